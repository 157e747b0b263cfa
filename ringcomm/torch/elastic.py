"""Horovod's names for elastic training, which this version does not have.

Scripts import these names even if they train with a fixed number of ranks. So a script can import
them, decorate functions and derive classes; calling any of these raises NotImplementedError.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

R = TypeVar("R")


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts have joined or left the job. This version never raises it.

    Attributes:
        skip_sync: True if the ranks need not receive the state again.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("hosts have joined or left the job")
        self.skip_sync = skip_sync


def run(func: Callable[..., R]) -> Callable[..., R]:
    """Decorate a training function: return a function that raises NotImplementedError."""

    @functools.wraps(func)
    def refuse(*args: Any, **kwargs: Any) -> R:
        del args, kwargs
        _refuse(f"elastic.run({getattr(func, '__name__', 'function')})")

    return refuse


class State:
    """State of elastic training. Its constructor raises NotImplementedError."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        _refuse(f"elastic.{type(self).__name__}")


class ObjectState(State):
    """State that consists of any objects; see State."""


class TorchState(ObjectState):
    """State that consists of a model and an optimizer; see State."""


class ElasticSampler(State):
    """Sampler for elastic training; see State."""


def _refuse(name: str) -> NoReturn:
    raise NotImplementedError(
        f"{name}: this version of ringcomm has no elastic training. Start the job with a fixed "
        "number of ranks and call the training function itself. After a failure, a job can go on "
        "from a ringcomm.torch.Checkpoint, also on another number of ranks; the samplers of "
        "ringcomm.data go on in the middle of an epoch"
    )
