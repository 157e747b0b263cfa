"""Options of ps.DistributedOptimizer: the mode, clipping, the scaler, what servers update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from ringcomm.codec import Codec
from ringcomm.ps import optim
from ringcomm.ps.optim import Assign, Updater
from ringcomm.ps.update_modes import Mode
from ringcomm.torch.ps.clipping import is_on

WHO: Final = "ps.DistributedOptimizer"  # error texts begin with it


@dataclass(frozen=True)
class ServerOptions:
    """Options of the servers and of all workers.

    class_name is the optimizer class whose updates servers make; None: they only take means.
    overlap is None if backward() pushes only for a worker's single optimizer.
    """

    mode: Mode
    class_name: str | None
    compression: Codec | None
    max_norm: float | None = None
    scaler: Any = None
    overlap: bool | None = None

    @cached_property
    def needs_all(self) -> bool:
        return self.max_norm is not None or is_on(self.scaler)

    @property
    def is_deferred(self) -> bool:
        """True if step() pushes in any case; gradients of rows of embeddings wait for it, too."""
        return self.needs_all or self.overlap is False

    @property
    def yields_to_others(self) -> bool:
        """True if step() pushes once the worker has another optimizer."""
        return not self.needs_all and self.overlap is None

    @property
    def is_held(self) -> bool:
        """True if the servers hold the mean of a round until the workers know its norm."""
        return self.needs_all and self.mode.has_rounds and self.class_name is not None

    @property
    def pushes_scaled(self) -> bool:
        """True if release() undoes the scale of the loss, which is the same for all in a round.

        In FirstOf(k) scales differ, because a worker's GradScaler sees only the worker's rounds.
        """
        return self.is_held and self.mode.name != "first_of"

    def updater(self, group: Mapping[str, Any]) -> Updater:
        if self.class_name is None:
            return Assign()
        found = optim.from_torch(group, self.class_name)
        if found is None:
            raise ValueError(f"{WHO}: servers cannot do {self.class_name} with {dict(group)}")
        return found
