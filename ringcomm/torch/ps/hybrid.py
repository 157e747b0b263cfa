"""Dense parameters by the ring, embeddings by the servers: who has something for the servers."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from ringcomm.ps.job import Session, session
from ringcomm.torch.ps import clock

_served: WeakKeyDictionary[Session, int] = WeakKeyDictionary()


def enrol_embedding() -> None:
    """Note that this worker has an embedding whose rows the servers own and update."""
    current = session()
    _served[current] = _served.get(current, 0) + 1


def require_something_served() -> None:
    """Raise ValueError if hybrid="ring" would leave nothing to the servers."""
    if not _served.get(session()):
        raise ValueError(
            "ps.DistributedOptimizer: hybrid='ring' reduces all of the optimizer's parameters by "
            "the ring, and there is no embedding on the servers: nothing is left for them. Use "
            "ringcomm.torch.DistributedOptimizer without servers, or leave hybrid= out"
        )


def count_steps(optimizer: Optimizer) -> None:
    """Count steps of a ring optimizer as this worker's: evaluators and ps.SSP go by them."""
    current = session()
    optimizer.register_step_post_hook(lambda stepped, *_: clock.tick(current, stepped))
