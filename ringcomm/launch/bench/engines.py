"""What can be measured: anything that binds a collective to its buffers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Final, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

import ringcomm as rc
from ringcomm.errors import ConfigError
from ringcomm.launch.lookup import lookup

T = TypeVar("T")
Array = NDArray[Any]
Call = Callable[[], Array | None]
Mode = Literal["sync", "async", "named"]
MODES: Final[tuple[Mode, ...]] = ("sync", "async", "named")


class Meeting(Protocol):
    """Where the ranks meet outside of what is measured; all methods are collective."""

    rank: int
    size: int
    local_size: int
    leaders: list[int]

    def barrier(self) -> None:
        """Return when all ranks are here, without taking their cores."""

    def highest(self, value: float) -> float:
        """Return the highest value of any rank, on every rank."""

    def total(self, value: int) -> int:
        """Return the sum over all ranks, on every rank."""

    def gather(self, value: T) -> list[T] | None:
        """Return the values of all ranks on rank 0, None on the others."""

    def exchange(self, data: Array, dest: int, out: Array, source: int) -> None:
        """Send `data` to one rank while `out` comes from another. Of these two ranks only."""


class Engine(Protocol):
    """One way to carry out the collectives.

    Attributes:
        name: of its lines in the table.
    """

    name: str

    def refuses(self, collective: str, dtype: np.dtype[Any], op: str) -> str | None:
        """Return why it cannot do this, the same on every rank; None if it can."""

    def bind(self, collective: str, op: str, send: Array, recv: Array) -> Call:
        """Return the call to be timed: it does the collective once and returns the result.

        Args:
            collective: a name of COLLECTIVES; root is rank 0.
            op: name of an rc.Op; "" where nothing is reduced.
            send: shape (count,), what this rank passes in; the root's alone is used by scatter.
            recv: shape (n,), where the result may go; `send` itself for the form in place.
        """


class RingcommEngine:
    """The public functions of ringcomm. Not in place, they return a new array: that is timed, too.

    Args:
        mode: "sync" calls allreduce(x), "async" allreduce_async(x).wait(), "named" the same with a
            name, which is agreed on once.
    """

    name = "ringcomm"

    def __init__(self, mode: Mode = "sync") -> None:
        self._mode = mode
        self._number = itertools.count()

    def refuses(self, collective: str, dtype: np.dtype[Any], op: str) -> str | None:
        """Return None: it does whatever has a meaning."""
        return None

    def bind(self, collective: str, op: str, send: Array, recv: Array) -> Call:
        """Return the call of the public function."""
        asynchronous = "" if self._mode == "sync" else "_async"
        place = "_" if recv is send else ""
        function = getattr(rc, f"{collective}{asynchronous}{place}")
        arguments: list[Any] = [] if collective == "barrier" else [send]
        arguments += [rc.Op(op)] if op else []
        if self._mode == "sync":
            return lambda: function(*arguments)
        name = f"bench {next(self._number)}" if self._mode == "named" else None
        return lambda: function(*arguments, name=name).wait()


class MemcpyEngine:
    """The yardstick: every rank copies a buffer of that size, all at the same time."""

    name = "memcpy"

    def refuses(self, collective: str, dtype: np.dtype[Any], op: str) -> str | None:
        """Return None: bytes are bytes."""
        return None

    def bind(self, collective: str, op: str, send: Array, recv: Array) -> Call:
        """Return the copy of `send` into `recv`."""
        return lambda: np.copyto(recv, send)


# Engines of other layers, which must not be imported here: "module:class".
_OTHERS: Final = {"gloo": "ringcomm.torch.gloo:GlooEngine"}
PEERS: Final = ("native", *_OTHERS)


def load_engine(name: str) -> Engine:
    """Return an engine of another layer; collective, after rc.init().

    Raises:
        ConfigError: what it needs is not installed.
    """
    try:
        made: Engine = lookup(_OTHERS[name])()
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--against {name} needs {error.name}: pip install 'ringcomm[torch]'"
        ) from error
    return made


def registered(nbytes: int) -> Array:
    """Return memory of rc.empty(), shape (nbytes,), uint8."""
    memory: Array = rc.empty((nbytes,), np.uint8)
    return memory


def explain(nbytes: int, dtype: np.dtype[Any]) -> str:
    """Return what rc.explain() says of an allreduce, on one line."""
    return str(rc.explain(nbytes, dtype.name)).partition("\n")[0]
