"""Numbers of optimizers that are wrapped again, because a server was lost meanwhile."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

from ringcomm.ps.session import Session
from ringcomm.torch.backward.optimizer_numbers_and_sample_weights import (
    go_on_from_number,
    last_number,
)


class _Call(NamedTuple):
    """A call of an evaluator's function."""

    snapshot: int  # which no other call has
    n_recovered: int
    number: int  # the last one that was drawn before it


_calls: Final[WeakKeyDictionary[Session, _Call]] = WeakKeyDictionary()  # the last that has wrapped


@contextlib.contextmanager
def same_number_if_called_again(current: Session) -> Iterator[None]:
    """Let a rank that wraps by itself, and does so again after a recovery, find the same tables.

    Args:
        current: the session. If the block raises, it draws the numbers of the block again.
    """
    if not current.takes_what_servers_have:
        yield
        return
    group = current.group
    if current.is_evaluator:
        _begin(current)
    before = last_number(group)
    try:
        yield
    except BaseException:
        go_on_from_number(group, before)
        raise


def _begin(current: Session) -> None:
    """Give back numbers that were drawn in a call that a loss has ended, and that nobody has.

    An evaluator's function may wrap several optimizers. If it fails behind the first, it may have
    kept that, or wraps it again, too.
    """
    group, last = current.group, _calls.get(current)
    if last is not None and last.n_recovered != current.n_recovered:
        gc.collect()  # optimizers are parts of cycles
        kept = max((each.number for each in current.recovering), default=0)
        go_on_from_number(group, max(last.number, kept))
        last = None
    if last is None or last.snapshot != current.snapshot:
        number = last_number(group)
        _calls[current] = _Call(current.snapshot, current.n_recovered, number)
