"""The rows of `ringcomm bench`, and its table: nccl-tests' order of columns, 120 wide. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Row:
    """One engine, one collective, one size, one form.

    Attributes:
        collective: allreduce, ...; of the memcpy line: that of the lines beside it.
        op: sum, ...; "" where nothing is reduced.
        dtype: float32, ...
        nbytes: of the whole buffer, as nccl-tests count it.
        count: its elements.
        engine: ringcomm, or memcpy.
        buffers: "registered" or "private".
        in_place: the result replaced the argument.
        wrong: wrong elements of all ranks, before and after timing.
        time_us: median over batches of a batch's mean call, by the slowest rank; None: not timed,
            because the result was wrong. So are the other times.
        call_p50_us: median over single calls, by the slowest rank of each.
        p99_us: 99th percentile of the same; the longest, if there were fewer than 100.
        calls: how many single calls.
        algbw_gbps: nbytes / time, GB/s (1e9).
        busbw_gbps: the same, comparable with the hardware's whatever the number of ranks.
        wire_share: least bytes that cross a host's link / time / the measured link; None on one
            host.
        algorithm: what ringcomm chose.
    """

    collective: str
    op: str
    dtype: str
    nbytes: int
    count: int
    engine: str
    buffers: str
    in_place: bool
    wrong: int
    time_us: float | None = None
    call_p50_us: float | None = None
    p99_us: float | None = None
    calls: int = 0
    algbw_gbps: float | None = None
    busbw_gbps: float | None = None
    wire_share: float | None = None
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
