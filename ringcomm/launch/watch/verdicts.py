"""Who is slow in a job, in words: the part of a step where that is known, else the rank. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from ringcomm.launch.watch.late_rank import History
from ringcomm.launch.watch.rank_rows import RankSample
from ringcomm.launch.watch.slow_part import Replies, slow_parts, slow_server

_WINDOW_NS: Final = 5_000_000_000


class Verdicts:
    """Looks at the live ranks of one job from time to time."""

    def __init__(self) -> None:
        self._history = History()
        self._replies: deque[tuple[int, dict[int, Replies]]] = deque()

    def add(self, ranks: Sequence[RankSample]) -> None:
        """Take a look at the live ranks of the job."""
        if not ranks:
            return
        now = ranks[0].time_ns
        self._history.add(now, {each.rank: each.busy_ns for each in _workers(ranks)})
        self._replies.append((now, {each.rank: each.replies for each in ranks if each.replies}))
        while len(self._replies) > 1 and now - self._replies[0][0] > _WINDOW_NS:
            self._replies.popleft()

    def texts(self, ranks: Sequence[RankSample]) -> list[str]:
        """Return what is to be said of the live ranks of the job; [] if nobody is slow."""
        workers = _workers(ranks)
        steps = {each.rank: each.steps for each in workers}
        if workers and all(steps.values()):
            servers = {
                int(number): each.rank
                for each in ranks
                for name, _, number in [each.page["role"].partition(" ")]
                if name == "server"
            }
            slow = slow_server(steps, self._recent_replies(), servers)
            return [str(each) for each in [*slow_parts(steps), *([slow] if slow else [])]]
        late = self._history.late_rank()
        return [] if late is None else [str(late)]

    def _recent_replies(self) -> dict[int, Replies]:
        """Return the replies of the last seconds."""
        if not self._replies:
            return {}
        first, last = self._replies[0][1], self._replies[-1][1]
        if len(self._replies) == 1:
            first = {}
        return {rank: _since(first.get(rank, {}), now) for rank, now in last.items()}


def _since(before: Replies, now: Replies) -> Replies:
    return {
        server: (n - before.get(server, (0, 0))[0], total - before.get(server, (0, 0))[1])
        for server, (n, total) in now.items()
    }


def _workers(ranks: Sequence[RankSample]) -> list[RankSample]:
    """Return the ranks that train: all, unless roles are given."""
    return [each for each in ranks if each.page["role"] in ("", "worker")]
