"""The rows of `ringcomm bench`, and its table: nccl-tests' order of columns, 120 wide. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Row:
    """One engine, one collective, one size, one form. A wrong result has no times."""

    collective: str  # of the memcpy line: that of the lines beside it
    op: str  # "" if nothing is reduced
    dtype: str
    nbytes: int  # of the whole buffer, as nccl-tests count it
    count: int
    engine: str
    buffers: str  # "registered" or "private"
    in_place: bool
    wrong: int  # elements of all ranks, before and after timing
    time_us: float | None = None  # median over batches of a batch's mean call, by the slowest rank
    call_p50_us: float | None = None  # median over single calls, each by its slowest rank
    p99_us: float | None = None  # 99th percentile of them; the longest, if there are fewer than 100
    calls: int = 0
    algbw_gbps: float | None = None  # nbytes / time; 1e9 bytes per second
    busbw_gbps: float | None = None  # comparable with the hardware's, for any number of ranks
    wire_share: float | None = None  # of the measured link, by the least bytes that must cross it
    algorithm: str = ""

    @property
    def label(self) -> str:
        """The engine, as the table calls it."""
        return f"{self.engine} reg" if self.buffers == "registered" else self.engine


def heading(*, has_wire: bool) -> list[str]:
    """Return the lines above the rows; their columns are those of lines()."""
    form = f" {'time':>7} {'algbw':>6} {'busbw':>6} {'#wrong':>6}"
    unit = f" {'(us)':>7} {'(GB/s)':>6} {'(GB/s)':>6} {'':>6}"
    share = "wire" if has_wire else "/cpy"
    return [
        "#" + f"{'':36}" + f" {'out-of-place':^28}" + f" {'in-place':^28}",
        f"#{'size':>9} {'count':>9} {'type':<8} {'op':<7}{form}{form} {'p99':>5} {share:>5} engine",
        f"#{'(B)':>9} {'':>9} {'':<8} {'':<7}{unit}{unit}",
    ]


def lines(rows: Sequence[Row], *, has_wire: bool) -> list[str]:
    """Return one line per engine for the rows of one case."""
    memcpy_us = next((row.time_us for row in rows if row.engine == "memcpy"), None)
    found = []
    for label in dict.fromkeys(row.label for row in rows):
        forms = {row.in_place: row for row in rows if row.label == label}
        row = forms.get(True) or forms[False]  # whose ratios the line shows
        wire = "-" if row.wire_share is None else f"{row.wire_share * 100:.0f}%"
        share = wire if has_wire else _ratio(row.time_us, memcpy_us)
        found.append(
            f" {row.nbytes:>9} {row.count:>9} {row.dtype:<8} {row.op or '-':<7}"
            f"{_form(forms.get(False))}{_form(forms.get(True))}"
            f" {_ratio(row.p99_us, row.call_p50_us):>5} {share:>5} {label}"
        )
    return found


def _form(row: Row | None) -> str:
    if row is None:
        return f" {'-':>7} {'-':>6} {'-':>6} {'-':>6}"
    time, algbw, busbw = (_digits(x) for x in (row.time_us, row.algbw_gbps, row.busbw_gbps))
    return f" {time:>7} {algbw:>6} {busbw:>6} {row.wrong:>6}"


def _digits(value: float | None) -> str:
    """Return about four digits: 0.0083, 3.142, 31.42, 314.2, 31416."""
    if value is None:
        return "-"
    decimals = next((d for limit, d in ((1, 4), (10, 3), (100, 2), (1000, 1)) if value < limit), 0)
    return f"{value:.{decimals}f}"


def _ratio(value: float | None, base: float | None) -> str:
    if value is None or not base:
        return "-"
    ratio = value / base
    return f"{ratio:.2f}x" if ratio < 10 else f"{min(ratio, 9999):.0f}x"
