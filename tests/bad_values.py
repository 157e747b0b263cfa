"""Arguments that no function expects, and what a call with one of them may come to."""

import inspect
import itertools
import zlib

import numpy as np
from harness import is_at_length

import ringcomm as rc
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.core.handle import Handle


class HostileError(Exception):
    """What a hostile object raises, whatever it is asked."""


class Hostile:
    """Has every protocol, and fails in each."""

    def _fail(self, *_args, **_options):
        raise HostileError("it is hostile")

    __index__ = __int__ = __float__ = __bool__ = __len__ = __iter__ = __eq__ = _fail
    __array__ = __getitem__ = __fspath__ = __call__ = __lt__ = __contains__ = _fail
    __hash__ = object.__hash__


class Faithless:
    """Is another number each time it is asked."""

    def __init__(self):
        self._numbers = itertools.count()

    def __index__(self):
        return next(self._numbers)


VALUES = {
    "None": lambda: None,
    "True": lambda: True,
    "-1": lambda: -1,
    "2**60": lambda: 2**60,
    "2**63": lambda: 2**63,
    "-2**70": lambda: -(2**70),
    "10**400": lambda: 10**400,
    "0.5": lambda: 0.5,
    "nan": lambda: float("nan"),
    "-inf": lambda: -float("inf"),
    "1j": lambda: 1j,
    "text": lambda: "x",
    "no text": lambda: "",
    "half a character": lambda: "\ud800",
    "long text": lambda: "x" * 100_000,
    "bytes": lambda: b"\0",
    "no list": list,
    "ragged": lambda: [[1], [2, 3]],
    "deep": lambda: [[[[0.5]]]],
    "numbers": lambda: [2**70, -1],
    "endless": itertools.count,
    "dict": lambda: {"a": 1},
    "object": object,
    "type": lambda: int,
    "function": lambda: lambda *_, **__: None,
    "nan in an array": lambda: np.array([1.0, np.nan]),
    "objects in an array": lambda: np.array([object()]),
    "text in an array": lambda: np.array("x"),
    "0-d": lambda: np.array(2**60),
    "hostile": Hostile,
    "hostile inside": lambda: [Hostile()],
    "faithless": Faithless,
}
CLEAR = (TypeError, ValueError, OSError, MemoryError, OverflowError, rc.RingcommError, HostileError)


def public(module):
    """Return the names of a module's functions and classes."""
    members = {name: getattr(module, name) for name in module.__all__}
    return {
        name
        for name, each in members.items()
        if callable(each) and not (inspect.isclass(each) and issubclass(each, BaseException))
    }


def parameters_of(function):
    """Return the names of a function's parameters."""
    return [
        name
        for name, each in inspect.signature(function).parameters.items()
        if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    ]


def cases_of(function, always=(), values=VALUES):
    """Yield (parameter, value's name) for what may be wrong in a call; the gate has a tenth of it.

    always: values that once broke something, each in the gate, too.
    """
    for case in itertools.product(parameters_of(function), values):
        is_due = zlib.crc32(f"{function.__qualname__}{case}".encode()) % 10 == 0
        if is_at_length() or is_due or case[1] in always:
            yield case


def come_to(function, options):
    """Call a function, wait for its handle, return its error, or None."""
    try:
        result = function(**options)
        if isinstance(result, Handle):
            result.wait()
    except CLEAR as error:
        return error
    return None


def n_begun():
    """Return how many operations this rank has begun: the others wait for it, or know why not."""
    tallies = {id(ledger.tally): ledger.tally for ledger in engine().groups.ledgers}
    return sum(tally.n_entered for tally in tallies.values())


def require_engine(rank, size, label):
    """Fail unless all ranks can still reduce."""
    try:
        total = rc.allreduce_(np.full(3, rank + 1.0))
    except rc.RingcommError as error:
        raise AssertionError(f"{label}: {type(error).__name__}: {error}") from error
    assert (total == size * (size + 1) / 2).all(), label
