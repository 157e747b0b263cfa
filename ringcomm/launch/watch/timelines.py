"""Merges the timelines of ranks, with aligned clocks, and sums them up. Pure.

Ranks of one host have one clock. The clocks of two hosts are compared by the ends of the operations
that both have done: a collective ends everywhere at about the same time.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

from ringcomm.foreign_text import is_int64, is_number, parsed_json, printable

Event = dict[str, Any]
_LEAST_COMMON: Final = 5  # operations by which two clocks can be compared
_TOGETHER: Final = ("allreduce", "allgather", "reduce_scatter", "alltoall", "barrier", "grouped")
_MOST_ROWS: Final = 20
_UNNAMED: Final = re.compile(r"(\w+) #\d+(| of .*)")
_PHASES: Final = ("B", "E", "X", "M")


def read_events(lines: Iterable[bytes]) -> tuple[list[Event], int]:
    """Return the events of a timeline's file, and how many lines hold something else.

    A line without an end is the last one of a rank that was killed while it wrote, and counts for
    none.

    Args:
        lines: those of the file, each with its end.
    """
    found, n_bad = [], 0
    for line in lines:
        text = line.strip().rstrip(b",")
        if text in (b"", b"[", b"]"):
            continue
        event = _event_of(text)
        if event is not None:
            found.append(event)
        elif line.endswith(b"\n"):
            n_bad += 1
    return found, n_bad


def _event_of(text: bytes) -> Event | None:
    """Return what a line says if it is an event that ranks write; a merged file has none."""
    try:
        event = parsed_json(text)
    except ValueError:
        return None
    is_event = (
        isinstance(event, dict)
        and is_int64(event.get("pid"))
        and is_int64(event.get("tid"))
        and event.get("ph") in _PHASES
        and is_number(event.get("ts"))
        and (event["ph"] == "E" or isinstance(event.get("name"), str))
        and (event["ph"] != "X" or is_number(event.get("dur")))
        and isinstance(args := event.get("args", {}), dict)
        and is_int64(args.get("nbytes", 0))
        and all(isinstance(args.get(name, ""), str) for name in ("host", "shape", "at"))
        and (event["ph"] != "M" or "args" in event)
    )
    return event if is_event else None


@dataclass(frozen=True)
class TraceSpan:
    """An operation of a rank, in microseconds.

    Attributes:
        number: counts those of this label.
        kind: of which the summary has one row: the label, or what unnamed operations share.
    """

    rank: int
    label: str
    number: int
    begin: float
    end: float
    nbytes: int
    kind: str


def spans_of(events: Iterable[Event]) -> list[TraceSpan]:
    """Return the operations that have ended, in the order of their ends."""
    under_way: dict[tuple[int, int], Event] = {}
    counts: Counter[tuple[int, str]] = Counter()
    numbers: dict[tuple[int, int], int] = {}
    found = []
    for event in events:
        row = event["pid"], event["tid"]
        if event["ph"] == "B":
            under_way[row] = event
            numbers[row] = counts[event["pid"], event["name"]]
            counts[event["pid"], event["name"]] += 1
        elif event["ph"] == "E" and row in under_way:
            began = under_way.pop(row)
            label, args = began["name"], began.get("args", {})
            nbytes, kind = args.get("nbytes", 0), _kind_of(label, args)
            times = began["ts"], event["ts"]
            found.append(TraceSpan(row[0], label, numbers[row], *times, nbytes, kind))
    return found


def _kind_of(label: str, args: Mapping[str, Any]) -> str:
    """Return the label; of an unnamed operation its collective, its shape and where it stands."""
    if not (found := _UNNAMED.fullmatch(label)):
        return label
    collective, group = found.groups()
    size = args.get("shape") or (f"{args['nbytes']} B" if args.get("nbytes") else "")
    at = f"at {args['at']}" if args.get("at") else ""
    return " ".join(filter(None, (f"{collective}{group}", size, at)))


def clock_offsets(hosts: Mapping[int, str], spans: Sequence[TraceSpan]) -> dict[str, float]:
    """Return host -> microseconds to add to its times, so that they are those of rank 0's host.

    Args:
        hosts: rank -> its host; ranks of one host have one clock.
        spans: the operations of all ranks.
    """
    ends: defaultdict[str, dict[tuple[str, int], float]] = defaultdict(dict)
    for span in spans:
        if span.label.startswith(_TOGETHER):
            of_host = ends[hosts[span.rank]]
            key = span.label, span.number
            of_host[key] = max(of_host.get(key, span.end), span.end)
    first = hosts[min(hosts)] if hosts else ""
    offsets = dict.fromkeys(hosts.values(), 0.0)
    for host in offsets:
        common = ends[host].keys() & ends[first].keys()
        if host != first and len(common) >= _LEAST_COMMON:
            offsets[host] = median(ends[first][key] - ends[host][key] for key in common)
    return offsets


def merge(events: Sequence[Event]) -> list[Event]:
    """Return the events of all ranks by time, with aligned clocks; each operation has an end."""
    hosts = hosts_of(events)
    offsets = clock_offsets(hosts, spans_of(events))
    merged = [event | {"ts": event["ts"] + offsets[hosts[event["pid"]]]} for event in events]
    merged.sort(key=lambda event: (event["ph"] != "M", event["ts"]))
    return [*merged, *_missing_ends(merged)]


def hosts_of(events: Iterable[Event]) -> dict[int, str]:
    """Return rank -> host; "" for timelines that do not tell."""
    hosts: dict[int, str] = {}
    for event in events:
        hosts.setdefault(event["pid"], "")
        if event["ph"] == "M" and event.get("name") == "process_name":
            hosts[event["pid"]] = event["args"].get("host", "")
    return hosts


def _missing_ends(events: Sequence[Event]) -> list[Event]:
    open_ones: dict[tuple[int, int], Event] = {}
    for event in events:
        row = event["pid"], event["tid"]
        if event["ph"] == "B":
            open_ones[row] = event
        elif event["ph"] == "E":
            open_ones.pop(row, None)
    last = max((event["ts"] for event in events), default=0.0)
    return [
        {"pid": pid, "tid": tid, "ph": "E", "ts": last, "args": {"outcome": "unfinished"}}
        for pid, tid in open_ones
    ]


@dataclass
class _Operation:
    """All operations of one kind."""

    n: int = 0
    total_us: float = 0.0
    nbytes: int = 0
    last: Counter[int] = field(default_factory=Counter)  # rank -> how often it came last
    late_us: list[float] = field(default_factory=list)  # the last one after the first one


def summary(events: Sequence[Event]) -> str:
    """Return a table of the operations that took the most time, and of the ranks.

    Unnamed ones of the same collective, shape and place in the program have one row.
    """
    spans = spans_of(merge(events))
    if not spans:
        return "no operation has ended"
    meetings: defaultdict[tuple[str, int], list[TraceSpan]] = defaultdict(list)
    operations: defaultdict[str, _Operation] = defaultdict(_Operation)
    of_rank: defaultdict[int, list[TraceSpan]] = defaultdict(list)
    for span in spans:
        meetings[span.label, span.number].append(span)
        each = operations[span.kind]
        each.n += 1
        each.total_us += span.end - span.begin
        each.nbytes += span.nbytes
        of_rank[span.rank].append(span)
    last_of: Counter[int] = Counter()
    for meeting in meetings.values():
        if len(meeting) > 1:
            late = max(meeting, key=lambda span: span.begin)
            operations[late.kind].last[late.rank] += 1
            last_of[late.rank] += 1
            operations[late.kind].late_us.append(late.begin - min(s.begin for s in meeting))
    seconds = (max(s.end for s in spans) - min(s.begin for s in spans)) / 1e6
    n_ranks, n_meetings = len(of_rank), sum(last_of.values())
    lines = [f"{n_ranks} ranks, {len(spans)} operations in {seconds:.1f} s", "", _HEAD]
    by_time = sorted(operations.items(), key=lambda item: -item[1].total_us)
    lines += [_operation_row(label, each) for label, each in by_time[:_MOST_ROWS]]
    lines += ["", "rank  in operations  comes last"]
    for rank, mine in sorted(of_rank.items()):
        share = f"{last_of[rank] / n_meetings:.0%}" if n_meetings else ""
        busy = _covered_us(mine) / 1e6 / max(seconds, 1e-9)
        lines.append(f"{rank:<4}  {busy:>12.0%}  {share:>10}")
    return "\n".join(lines)


def _covered_us(spans: Iterable[TraceSpan]) -> float:
    """Return the time in which at least one of the operations was under way."""
    covered, until = 0.0, float("-inf")
    for span in sorted(spans, key=lambda each: each.begin):
        covered += max(span.end - max(span.begin, until), 0.0)
        until = max(until, span.end)
    return covered


_HEAD: Final = "   count   total s   mean ms        MB  last rank    late ms  operation"


def _operation_row(label: str, each: _Operation) -> str:
    (rank, n), *_ = each.last.most_common(1) or [(-1, 0)]
    last = f"{rank} ({n / sum(each.last.values()):.0%})" if n else ""
    late = f"{median(each.late_us) / 1e3:.2f}" if each.late_us else ""
    return (
        f"{each.n:>8}  {each.total_us / 1e6:>8.2f}  {each.total_us / each.n / 1e3:>8.2f}  "
        f"{each.nbytes / 1e6:>8.1f}  {last:>9}  {late:>9}  {printable(label)}"
    )
