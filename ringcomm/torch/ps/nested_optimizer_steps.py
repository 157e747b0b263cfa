"""Optimizers inside of a wrapped one, as SAM and Lookahead have: they step within its step()."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

from torch.optim import Optimizer

from ringcomm.errors import RingcommError
from ringcomm.torch.ps.distributed_optimizer_options import WHO


class NestedOptimizers:
    """The optimizers that are attributes of an optimizer, whose workers make the updates.

    Outside of the whole optimizer's step(), .grad is this worker's own, and each worker would train
    by itself: there a step() of a part raises RingcommError.
    """

    def __init__(self, whole: Optimizer) -> None:
        self._is_stepping = False
        ref = weakref.ref(self)

        def require_whole(part: Optimizer, *_: object) -> None:
            nested = ref()
            if nested is not None and not nested._is_stepping:
                raise RingcommError(
                    f"{WHO}: {type(part).__name__}.step() was called outside of step() of the "
                    "optimizer of which it is a part, with gradients of this worker alone. Call "
                    "step() of the whole optimizer (SAM: with a closure), or use hybrid='ring'"
                )

        for part in vars(whole).values():
            if isinstance(part, Optimizer):
                part.register_step_pre_hook(require_whole)

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Return the context of the whole optimizer's own step()."""
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False
