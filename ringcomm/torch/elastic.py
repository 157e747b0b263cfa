"""Horovod's names for elastic training, which this version does not have.

Scripts import them at their top, also where they train with a fixed number of ranks: so each can be
imported, decorated with and inherited from, and says at its use what is missing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

R = TypeVar("R")

__all__ = ["ElasticSampler", "HostsUpdatedInterrupt", "ObjectState", "State", "TorchState", "run"]


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts have joined or left the job. Never raised by this version.

    Attributes:
        skip_sync: the state need not be sent to all ranks again.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("hosts have joined or left the job")
        self.skip_sync = skip_sync


def run(func: Callable[..., R]) -> Callable[..., R]:
    """Return a function that raises NotImplementedError: the decorator of elastic training."""

    @functools.wraps(func)
    def refuse(*args: Any, **kwargs: Any) -> R:
        del args, kwargs
        _refuse(f"elastic.run({getattr(func, '__name__', 'function')})")

    return refuse


class State:
    """State of an elastic training. Raises NotImplementedError when it is made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        _refuse(f"elastic.{type(self).__name__}")


class ObjectState(State):
    """State of any objects. Raises NotImplementedError when it is made."""


class TorchState(ObjectState):
    """State of a model and an optimizer. Raises NotImplementedError when it is made."""


class ElasticSampler(State):
    """Sampler of an elastic training. Raises NotImplementedError when it is made."""


def _refuse(what: str) -> NoReturn:
    raise NotImplementedError(
        f"{what}: this version of ringcomm has no elastic training. Start the job with a fixed "
        "number of ranks and call the training function itself; ringcomm.torch.Checkpoint saves "
        "what a job needs to go on after it has failed, also on another number of ranks, and "
        "ringcomm.data has samplers that go on in the middle of an epoch"
    )
