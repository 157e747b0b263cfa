"""ps.init(rebalance_every_s=): the leader measures traffic, and moves partitions."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final

from ringcomm.ps.client.json_requests import ask_json
from ringcomm.ps.placement.plan_balance import Balance
from ringcomm.ps.placement.rebalance import REQUEST_NBYTES, Rebalanced, measured, move_all, shares
from ringcomm.ps.protocol.frames import Kind

if TYPE_CHECKING:
    from ringcomm.ps.client.future import Future
    from ringcomm.ps.session import Session

_log: Final = logging.getLogger("ringcomm")


class Balancer:
    """Service of the leader: asks all servers for their statistics, and decides."""

    is_busy: Final = False
    has_news: Final = False

    def __init__(self, current: Session, every_s: float) -> None:
        self._session = current
        self._every_s = every_s
        self._due = time.monotonic() + every_s
        self._servers = current.client.servers
        self._balance = Balance(self._servers, REQUEST_NBYTES)
        self._is_asking = False

    def poll(self, *, only_news: bool = False) -> bool:
        """See progress.Service."""
        del only_news
        server = self._session.dispatcher.server
        assert server is not None
        if self._is_asking or time.monotonic() < self._due or server.is_over:
            return False
        self._is_asking = True
        ask_json(self._session.client, Kind.STATS, {"keys": True}).then(self._decide)
        return True

    def _decide(self, answers: Future[list[dict[str, Any]]]) -> None:
        try:
            if not self._begin_moves(answers.result()):
                self._rest()
        except Exception as error:  # noqa: BLE001 - whatever it is, the next look may succeed
            self._warn("nothing moved in this period", error)

    def _begin_moves(self, answers: list[dict[str, Any]]) -> bool:
        """Return True if partitions are going to move."""
        view, heat = measured(answers)
        moves = self._balance.moves(view, heat)
        if not moves:
            return False
        after = view.with_({move.partition: (move.dest,) for move in moves})
        load, load_after = (shares(each, heat, self._servers) for each in (view, after))
        move_all(self._session, moves, load, load_after).then(self._report)
        return True

    def _report(self, done: Future[Rebalanced]) -> None:
        try:
            _log.info("ps.init(rebalance_every_s=%g): %s", self._every_s, done.result())
        except Exception as error:  # noqa: BLE001 - partitions that could not move stay where they are
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
