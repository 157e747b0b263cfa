"""Options of a ps.DistributedOptimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ringcomm.codec import Codec
from ringcomm.ps import optim
from ringcomm.ps.optim import Assign, Updater
from ringcomm.ps.rounds import Mode
from ringcomm.torch.ps.scaling import is_on

WHO: Final = "ps.DistributedOptimizer"  # begins the texts of errors


@dataclass(frozen=True)
class ServerOptions:
    """Options that the servers, or all workers, go by.

    class_name is that of the optimizer that servers are to be; None: they only take means.
    """

    mode: Mode
    class_name: str | None
    compression: Codec | None
    max_norm: float | None = None
    scaler: Any = None

    @property
    def is_deferred(self) -> bool:
        """True if step() pushes: what it pushes depends on all gradients, or the user scales."""
        return self.max_norm is not None or is_on(self.scaler)

    @property
    def is_held(self) -> bool:
        """True if the mean of a round becomes an update once its norm is known."""
        return self.is_deferred and self.mode.has_rounds and self.class_name is not None

    @property
    def pushes_scaled(self) -> bool:
        """True if release() undoes the scale of the loss: all in a round have the same.

        With FirstOf(k) a worker's GradScaler knows of the rounds alone that the worker was in.
        """
        return self.is_held and self.mode.name != "first_of"

    def updater(self, group: Mapping[str, Any]) -> Updater:
        """Return what the servers do with gradients of a parameter group."""
        if self.class_name is None:
            return Assign()
        found = optim.from_torch(group, self.class_name)
        if found is None:
            raise ValueError(f"{WHO}: servers cannot do {self.class_name} with {dict(group)}")
        return found
