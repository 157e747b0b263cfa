"""ps.init(rebalance_every_s=): the leader looks at the traffic, and lets partitions move."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final

from ringcomm.ps.balance import Balance
from ringcomm.ps.frames import Kind
from ringcomm.ps.moments import asking
from ringcomm.ps.rebalancing import REQUEST_NBYTES, Rebalanced, measured, move_all, shares

if TYPE_CHECKING:
    from ringcomm.ps.future import Future
    from ringcomm.ps.job import Session

_log: Final = logging.getLogger("ringcomm")


class Balancer:
    """Service of the leader: asks all servers what they have done, and decides. It waits for none.

    Args:
        current: of the leader.
        every_s: from one look to the next, in seconds.
    """

    is_busy: Final = False

    def __init__(self, current: Session, every_s: float) -> None:
        self._session = current
        self._every_s = every_s
        self._due = time.monotonic() + every_s
        self._servers = range(current.client.n_servers)
        self._balance = Balance(self._servers, REQUEST_NBYTES)
        self._is_asking = False

    has_news = False

    def poll(self, *, only_news: bool = False) -> bool:
        """See progress.Service."""
        del only_news
        server = self._session.desk.server
        assert server is not None
        if self._is_asking or time.monotonic() < self._due or server.is_over:
            return False
        self._is_asking = True
        asking(self._session, Kind.STATS, {"keys": True}).then(self._decide)  # as collect() asks
        return True

    def _decide(self, told: Future[list[dict[str, Any]]]) -> None:
        try:
            if not self._begin_moves(told.result()):
                self._rest()
        except Exception as error:  # noqa: BLE001 - whatever it is, the next look may succeed
            self._warn("nothing moved in this period", error)

    def _begin_moves(self, told: list[dict[str, Any]]) -> bool:
        """Return True if partitions are going to move."""
        view, heat = measured(told)
        moves = self._balance.moves(view, heat)
        if not moves:
            return False
        after = view.with_({move.partition: (move.dest,) for move in moves})
        load, load_after = (shares(each, heat, self._servers) for each in (view, after))
        move_all(self._session, moves, load, load_after).then(self._tell)
        return True

    def _tell(self, done: Future[Rebalanced]) -> None:
        try:
            _log.info("ps.init(rebalance_every_s=%g): %s", self._every_s, done.result())
        except Exception as error:  # noqa: BLE001 - what could not move stays where it is
            self._warn("some partitions did not move", error)
        else:
            self._rest()

    def _warn(self, what: str, error: Exception) -> None:
        """Log an error, and go on with the next period."""
        kind = type(error).__name__
        _log.warning("ps.init(rebalance_every_s=%g): %s: %s: %s", self._every_s, what, kind, error)
        self._rest()

    def _rest(self) -> None:
        self._is_asking = False
        self._due = time.monotonic() + self._every_s
