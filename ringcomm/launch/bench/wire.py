"""What the link of a host carries, to compare with."""

from __future__ import annotations

import time

import numpy as np

from ringcomm.launch.bench.engines import Meeting

_NBYTES = 4 << 20
_REPETITIONS = 5


def measure_link(meeting: Meeting) -> float | None:
    """Return the bytes per second that each host can send while it receives; None on one host.

    Collective. The first rank of each host sends 4 MiB to the next host's while it receives from
    the one before, all at the same time: the best of 5, by the slowest host.
    """
    if len(meeting.leaders) == 1:
        return None
    data, out = np.ones(_NBYTES, np.uint8), np.empty(_NBYTES, np.uint8)
    best_s = min(_slowest_s(meeting, data, out) for _ in range(_REPETITIONS))
    return _NBYTES / best_s


def _slowest_s(meeting: Meeting, data: np.ndarray, out: np.ndarray) -> float:
    meeting.barrier()
    start = time.perf_counter()
    if meeting.rank in meeting.leaders:
        place, n = meeting.leaders.index(meeting.rank), len(meeting.leaders)
        meeting.exchange(
            data, meeting.leaders[(place + 1) % n], out, meeting.leaders[(place - 1) % n]
        )
    return meeting.highest(time.perf_counter() - start)
