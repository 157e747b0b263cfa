"""ps.stats(): statistics of the servers."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any, Final

from ringcomm.ps.client.json_requests import ask_json
from ringcomm.ps.protocol.frames import ServerOption
from ringcomm.ps.session import Session, session

_RATES: Final = {
    "requests": "requests_per_s",
    "nbytes_in": "nbytes_in_per_s",
    "nbytes_out": "nbytes_out_per_s",
}
_before: Final[weakref.WeakKeyDictionary[Session, list[dict[str, Any]]]] = (
    weakref.WeakKeyDictionary()
)


def stats() -> list[dict[str, Any]]:
    """Return the statistics of each server, by server.

    Returns:
        For each:
        "copies": processes that have all it has: 2 with ps.init(replication=2), unless one died and
        another copy is not complete yet.
        "requests", "nbytes_in", "nbytes_out": since it began, "seconds" ago.
        "requests_per_s", "nbytes_in_per_s", "nbytes_out_per_s": since this rank's last call.
        "waiting": pulls that wait for a round, or for a slow worker.
        "queue": those, and frames that wait to leave or for their body.
        "pushes", "pulls", "late", "apply_s" (seconds spent on updates), "elements", "rows",
        "row_nbytes" (memory they take), "partitions" (of hash tables), "admitted", "rejected",
        "evicted", and "staleness", a histogram: updates that an async push had missed -> how many
        did. These are all updates since its worker last pulled, its own included. Slices of dense
        tables count since they were made: they keep these numbers when they move. Of hash tables,
        this server's own work counts; a push counts a key once, however often the key stands in it.
        "tables": name -> number of the partition -> the same of each.
        "hashtables": name -> the same of all that the server has of a hash table.
    """
    current = session()
    answers = ask_json(current.client, ServerOption.STATS, {"keys": False}).wait()
    before = {each["server"]: each for each in _before.get(current, ())}
    _before[current] = answers
    return [_summary(each, before.get(each["server"], {})) for each in answers]


def counted_since(before: float, now: float) -> float:
    """Return what a server has counted since `before`, which may be of a process that died.

    Its copy has counted less: no reads, and what it was made of began before it.
    """
    return now - before if now >= before else now


def _summary(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    seconds = max(counted_since(before.get("seconds", 0.0), now["seconds"]), 1e-9)
    rates = {
        rate: counted_since(before.get(key, 0), now[key]) / seconds for key, rate in _RATES.items()
    }
    totals: Counter[str] = Counter()
    staleness: Counter[int] = Counter()
    dense = [part for parts in now["tables"].values() for part in parts.values()]
    for each in [*dense, *now["hashtables"].values()]:
        totals.update({key: n for key, n in each.items() if key != "staleness"})
        staleness.update({int(missed): n for missed, n in each["staleness"].items()})
    return {**totals, **now, **rates, "staleness": dict(sorted(staleness.items()))}
