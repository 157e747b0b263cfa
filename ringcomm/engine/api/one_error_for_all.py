"""What one rank does or reads for all, and refuses, is the same error on all ranks.

If that rank alone raised its error, it would end. Where a job goes on after losses, the others
would take that for one, go on without what was refused, and might overwrite it. An error of this
module is no loss: nobody heals, and every rank ends with it unless its program catches it.
"""

from __future__ import annotations

import contextlib
import traceback
from typing import NamedTuple, NoReturn, TypeVar

from ringcomm.engine.api import collectives
from ringcomm.errors import CommTimeoutError, NewViewInterrupt, PeerFailedError, RingcommError
from ringcomm.regular_files import BrokenFileError
from ringcomm.status.error_printer import others_raise_it_too

T = TypeVar("T")
_OF_OPERATIONS = (PeerFailedError, CommTimeoutError, NewViewInterrupt)


def gather_or_raise(where: str, mine: T, error: Exception | None = None) -> list[T | None]:
    """Return the objects of all ranks; if some have failed, raise the error of the first on all.

    Collective. None stands for a rank that is in join().

    Args:
        where: begins the text, such as "checkpoint[FOLDER]".
        mine: what this rank says to the others; can be pickled.
        error: why this rank, by itself, cannot go on; None: it can. An error of an operation is
            raised at once: the others have one, too.

    Raises:
        TypeError: on all ranks, if that of the first was one.
        RingcommError: on all ranks, for any other; the text names the rank and the error.
    """
    if isinstance(error, _OF_OPERATIONS):
        raise error
    failure = None if error is None else _Failure.of(where, error)
    reports = collectives.allgather_object((failure, mine))  # without a name: `where` may differ
    for rank, (failed, _) in enumerate(each or (None, None) for each in reports):
        if failed is not None:
            raise_together(failed.error_of(rank))
    return [None if each is None else each[1] for each in reports]


def raise_together(error: Exception) -> NoReturn:
    """Raise an error that all ranks raise here, once each of them is here. Collective.

    Who raised it before that could end while another rank still waits for the news, and that one
    would see a loss instead.
    """
    with contextlib.suppress(RingcommError):  # a rank is lost, and this one knows the error
        collectives.barrier(name="an error of all ranks")
    others_raise_it_too(error)
    raise error


class _Failure(NamedTuple):
    """An error as data, the same on all ranks, so that only one of a host prints it."""

    where: str
    is_type_error: bool
    text: str
    trace: str  # where it rose, if nobody expects it

    @classmethod
    def of(cls, where: str, error: Exception) -> _Failure:
        is_type_error = isinstance(error, TypeError)
        if is_type_error or isinstance(error, RingcommError | BrokenFileError):
            return cls(where, is_type_error, str(error), "")
        trace = "".join(traceback.format_exception(error)).rstrip()
        return cls(where, is_type_error, f"{type(error).__name__}: {error}", trace)

    def error_of(self, rank: int) -> Exception:
        kind = TypeError if self.is_type_error else RingcommError
        error = kind(f"{self.where}: rank {rank}: {self.text}")
        if self.trace:
            error.add_note(f"Rank {rank} failed here:\n{self.trace}")
        return error
