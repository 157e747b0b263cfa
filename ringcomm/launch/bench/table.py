"""The rows of `ringcomm bench`, and its table, with the columns of nccl-tests. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class BenchRow:
    """The result of one engine for one case in one form. Times are None if it was wrong."""

    collective: str  # the engine memcpy is measured beside each collective
    op: str  # "" if nothing is reduced
    dtype: str
    nbytes: int  # bytes of the whole buffer, as in nccl-tests
    count: int  # elements of the whole buffer
    engine: str
    buffers: str  # "registered" or "private"
    in_place: bool
    wrong: int  # number of wrong elements on all ranks, before and after timing
    time_us: float | None = None  # median over batches of the mean call, on the slowest rank
    call_p50_us: float | None = None  # median over calls, each on its slowest rank
    p99_us: float | None = None  # 99th percentile of the calls: of up to 100, the longest
    calls: int = 0
    algbw_gbps: float | None = None  # nbytes / time; 1e9 bytes per second
    busbw_gbps: float | None = None  # comparable with the hardware's bandwidth
    wire_share: float | None = None  # of the link's bandwidth, by the fewest bytes that cross it
    algorithm: str = ""

    @property
    def label(self) -> str:
        return f"{self.engine} reg" if self.buffers == "registered" else self.engine


def heading(*, has_wire: bool) -> list[str]:
    form = f" {'time':>7} {'algbw':>6} {'busbw':>6} {'#wrong':>6}"
    unit = f" {'(us)':>7} {'(GB/s)':>6} {'(GB/s)':>6} {'':>6}"
    share = "wire" if has_wire else "/cpy"
    return [
        "#" + f"{'':36}" + f" {'out-of-place':^28}" + f" {'in-place':^28}",
        f"#{'size':>9} {'count':>9} {'type':<8} {'op':<7}{form}{form} {'p99':>5} {share:>5} engine",
        f"#{'(B)':>9} {'':>9} {'':<8} {'':<7}{unit}{unit}",
    ]


def lines(rows: Sequence[BenchRow], *, has_wire: bool) -> list[str]:
    memcpy_us = next((row.time_us for row in rows if row.engine == "memcpy"), None)
    found = []
    for label in dict.fromkeys(row.label for row in rows):
        forms = {row.in_place: row for row in rows if row.label == label}
        row = forms.get(True) or forms[False]  # the line shows the ratios of this row
        wire = "-" if row.wire_share is None else f"{row.wire_share * 100:.0f}%"
        share = wire if has_wire else _ratio(row.time_us, memcpy_us)
        found.append(
            f" {row.nbytes:>9} {row.count:>9} {row.dtype:<8} {row.op or '-':<7}"
            f"{_form(forms.get(False))}{_form(forms.get(True))}"
            f" {_ratio(row.p99_us, row.call_p50_us):>5} {share:>5} {label}"
        )
    return found


def _form(row: BenchRow | None) -> str:
    if row is None:
        return f" {'-':>7} {'-':>6} {'-':>6} {'-':>6}"
    time, algbw, busbw = (_digits(x) for x in (row.time_us, row.algbw_gbps, row.busbw_gbps))
    return f" {time:>7} {algbw:>6} {busbw:>6} {row.wrong:>6}"


def _digits(value: float | None) -> str:
    if value is None:
        return "-"
    decimals = next((d for limit, d in ((1, 4), (10, 3), (100, 2), (1000, 1)) if value < limit), 0)
    return f"{value:.{decimals}f}"


def _ratio(value: float | None, base: float | None) -> str:
    if value is None or not base:
        return "-"
    ratio = value / base
    return f"{ratio:.2f}x" if ratio < 10 else f"{min(ratio, 9999):.0f}x"
