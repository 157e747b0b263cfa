"""Every exception class of ringcomm.

    RingcommError
    |-- ConfigError           a setting, the launch or the installation is wrong
    |-- NotInitializedError   rc.init() has not run here, or this is not a rank; also a ValueError
    |-- MismatchError         the calls of the ranks differ; the same error on every rank
    |-- PeerFailedError       a rank died, failed or left while this one needed it
    |   `-- ServerLostError   that rank held the only copy of a parameter-server shard
    |-- CodecError            bytes that are not what a codec wrote; also a ValueError
    `-- CommTimeoutError      a wait outlasted its deadline; also a TimeoutError

A bad argument that is the same on every rank raises TypeError or ValueError, as numpy would.
"""

from __future__ import annotations

from collections.abc import Iterable


class RingcommError(RuntimeError):
    """Base of all errors of this library."""


class ConfigError(RingcommError):
    """A setting, the launch or the installation is wrong; the text says what to change."""


class NotInitializedError(RingcommError, ValueError):
    """The call needs rc.init() in this process. A ValueError, too, because Horovod raises that."""


class MismatchError(RingcommError):
    """Ranks disagree on what to do. Raised on every rank; the engine stays usable.

    No data was sent, except under a name that all had agreed on before. In that case no result is
    returned, and arrays to be overwritten have undefined contents. The text says which case it is.
    """


class PeerFailedError(RingcommError):
    """A rank that this one needs died, failed or left.

    Attributes:
        rank: the rank that failed first, as far as this rank knows.
        reason: how it failed, in words ("raised ValueError: boom").
    """

    def __init__(self, message: str, *, rank: int, reason: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), str(self), {"rank": self.rank, "reason": self.reason})


class ServerLostError(PeerFailedError):
    """A parameter server died and no replica holds its shard."""


class CodecError(RingcommError, ValueError):
    """A buffer is not what a codec wrote, or not for this array; nothing was decoded."""


class CommTimeoutError(RingcommError, TimeoutError):
    """A wait outlasted its deadline.

    Attributes:
        missing: ranks that had not entered the operation, as far as this rank could learn.
    """

    def __init__(self, message: str, *, missing: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), str(self), {"missing": self.missing})


def _rebuild(
    kind: type[RingcommError], message: str, attributes: dict[str, object]
) -> RingcommError:
    return kind(message, **attributes)
