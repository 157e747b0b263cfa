"""Every exception class of ringcomm.

    RingcommError
    |-- ConfigError           a setting, the launch or the installation is wrong
    |-- NotInitializedError   rc.init() has not run here, or this is not a rank; also a ValueError
    |-- MismatchError         the calls of the ranks differ; the same error on every rank
    |-- PeerFailedError       a rank died, failed or left while this one needed it
    |   `-- ServerLostError   that rank held the only copy of a parameter-server shard
    |-- CodecError            a buffer is not valid for a codec; also a ValueError
    |-- CommTimeoutError      a wait took longer than its deadline; also a TimeoutError
    `-- NewViewInterrupt      ranks are to join an elastic job, or to leave; for elastic.run

For a bad argument that is the same on every rank, functions raise TypeError or ValueError.
"""

from __future__ import annotations

from collections.abc import Iterable


class RingcommError(RuntimeError):
    """Base of all errors of this library."""


class ConfigError(RingcommError):
    """A setting, the launch or the installation is wrong; the text says what to change."""


class NotInitializedError(RingcommError, ValueError):
    """The call needs rc.init() in this process. Also a ValueError, as in Horovod."""


class MismatchError(RingcommError):
    """The calls of the ranks differ. Raised on every rank; the engine stays usable.

    No data was sent, unless ranks had agreed on an earlier call with the same name. Then data may
    have been sent, and arrays to be overwritten have undefined contents. The text says which case
    it is.
    """


class PeerFailedError(RingcommError):
    """A rank that this one needs died, failed or left.

    Attributes:
        rank: the rank that failed first, as far as this rank knows.
        reason: how that rank failed, in words ("raised ValueError: boom").
        view: number of the view that `rank` is about; 0 unless the job has lost ranks and gone on.
    """

    def __init__(self, message: str, *, rank: int, reason: str, view: int = 0) -> None:
        super().__init__(message)
        self.rank = rank
        self.reason = reason
        self.view = view

    def __reduce__(self) -> tuple[object, ...]:
        attributes = {"rank": self.rank, "reason": self.reason, "view": self.view}
        return _rebuild, (type(self), str(self), attributes)


class ServerLostError(PeerFailedError):
    """A parameter server died and no replica holds its shard."""


class CodecError(RingcommError, ValueError):
    """No codec wrote the buffer, or it does not fit the array; nothing was decoded."""


class CommTimeoutError(RingcommError, TimeoutError):
    """A wait took longer than its deadline.

    Attributes:
        missing: ranks that had not entered the operation, as far as this rank could learn; without
            those that wait in another one, unless all do: these may only wait for the others.
    """

    def __init__(self, message: str, *, missing: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), str(self), {"missing": self.missing})


class NewViewInterrupt(RingcommError):
    """Ranks are to join the job, or to leave it. commit() raises this; elastic.run catches it."""


def _rebuild(
    kind: type[RingcommError], message: str, attributes: dict[str, object]
) -> RingcommError:
    return kind(message, **attributes)
