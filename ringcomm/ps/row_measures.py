"""Asks how large the mean of a round of rows is, and lets it end; a client's side of row_holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ringcomm.ps.client import Ask
from ringcomm.ps.frames import Kind, Status
from ringcomm.ps.keys import Portion
from ringcomm.ps.messages import MEASURE, MEASURED, RELEASE, SKIP, PushMeta
from ringcomm.ps.opened import factor_of
from ringcomm.ps.row_calls import Owners, Piece, RowCalls

if TYPE_CHECKING:
    from ringcomm.ps.future import Future
    from ringcomm.ps.link import Delivery


class Mean(NamedTuple):
    """The mean of a round of a hash table, over all workers.

    Attributes:
        squares: the sum of its squares.
        is_finite: it has no inf or NaN.
        is_in: this worker's contribution is part of it, on all servers.
        is_over: a server has ended the round long ago, or it was not held: the rest is not known.
    """

    squares: float
    is_finite: bool
    is_in: bool
    is_over: bool


class RowMeasures:
    """Asks the servers of one hash table.

    Args:
        calls: of the table.
        name: of it.
        number: of it, in messages.
        n_servers: of the job.
    """

    def __init__(self, calls: RowCalls, name: str, number: int, n_servers: int) -> None:
        self._calls, self._name, self._number = calls, name, number
        self._n_servers = n_servers

    def measure(self, number: int) -> Future[Mean]:
        """Return how large the mean of a round is, once it is complete on all servers."""
        told: dict[int, tuple[float, bool, bool] | None] = {}

        def note(server: int, reply: Delivery) -> None:
            is_over = reply.header.status == Status.LATE
            told[server] = None if is_over else MEASURED.unpack(reply.meta)

        def asked(server: int) -> Ask:
            return Ask(
                Kind.ROWS, server=server, table=self._number, clock=number, option=MEASURE,
                on_reply=lambda reply: note(server, reply),
            )  # fmt: skip

        def finish() -> Mean:
            known = [told[server] for server in sorted(told)]
            means = [each for each in known if each is not None]
            return Mean(
                squares=sum(each[0] for each in means),
                is_finite=all(each[1] for each in means),
                is_in=len(means) == len(known) and all(each[2] for each in means),
                is_over=len(means) < len(known),
            )

        return self._calls.begin(f"measure[{self._name}]", self._all(asked, told.clear), finish)

    def release(self, number: int, factor: float | None) -> Future[None]:
        """Let a round end; see HashTable.release()."""
        label = f"release[{self._name}]"
        flags, weight = RELEASE | (SKIP if factor is None else 0), factor_of(label, factor)
        meta = PushMeta(weight, 0, 0, "", flags, np.empty(0)).packed()

        def asked(server: int) -> Ask:
            return Ask(Kind.PUSH, server=server, table=self._number, clock=number, meta=meta)

        return self._calls.begin(label, self._all(asked, lambda: None), lambda: None)

    def _all(
        self, asked: Callable[[int], Ask], restart: Callable[[], object]
    ) -> Callable[[Owners, list[Piece]], list[Piece]]:
        """Return what asks all servers; if rows have moved meanwhile, all of them anew."""
        nothing = np.empty(0, np.uint64)

        def split(_owners: Owners, _back: list[Piece]) -> list[Piece]:
            restart()
            return [
                Piece(Portion(server, nothing, None), asked(server))
                for server in range(self._n_servers)
            ]

        return split
