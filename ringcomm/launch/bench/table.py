"""The table in nccl-tests' order of columns, 120 wide. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ringcomm.launch.bench.report import Report, Row


def preamble(report: Report) -> list[str]:
    """Return the lines that say what was run, and what speaks against trusting it."""
    hosts = "1 host" if report.hosts == 1 else f"{report.hosts} hosts"
    settings = "its own settings" if report.is_mpi_default else "ringcomm's settings"
    lines = [
        f"# ringcomm bench {report.version}: {report.size} ranks on {hosts}, {report.cores} cores "
        f"for those of rank 0's host, mode {report.mode}",
        f"# {report.mpi}, {settings}",
        *(f"# {name}={value}" for name, value in report.settings.items()),
    ]
    if report.link_gbps is not None:
        lines.append(f"# link between hosts: {report.link_gbps * 1e3:.1f} MB/s each way, measured")
    if report.size > report.cores * report.hosts:
        lines.append("# more ranks than cores: times tell how they wait for each other, too")
    if report.load > _QUIET:
        lines.append(
            f"# load average {report.load:.1f}: other programs run. Compare lines, not runs"
        )
    return lines


def heading(*, has_wire: bool) -> list[str]:
    """Return the two lines above the rows; their columns are those of rows()."""
    form = f" {'time':>7} {'algbw':>6} {'busbw':>6} {'#wrong':>6}"
    unit = f" {'(us)':>7} {'(GB/s)':>6} {'(GB/s)':>6} {'':>6}"
    share = "wire" if has_wire else "/cpy"
    return [
        "#" + f"{'':36}" + f" {'out-of-place':^28}" + f" {'in-place':^28}",
        f"#{'size':>9} {'count':>9} {'type':<8} {'op':<7}{form}{form} {'p99':>5} {share:>5} engine",
        f"#{'(B)':>9} {'':>9} {'':<8} {'':<7}{unit}{unit}",
    ]


def rows(found: Sequence[Row], *, has_wire: bool) -> list[str]:
    """Return one line per engine for the rows of one case, which stand in one order of engines."""
    labels = list(dict.fromkeys(row.label for row in found))
    memcpy_us = next((row.time_us for row in found if row.engine == "memcpy"), None)
    return [
        _line([row for row in found if row.label == label], memcpy_us, has_wire=has_wire)
        for label in labels
    ]


_QUIET = 0.5


def _line(forms: list[Row], memcpy_us: float | None, *, has_wire: bool) -> str:
    """Return the line of one engine: one or two rows."""
    by_place = {row.in_place: row for row in forms}
    row = by_place.get(True, forms[0])  # of which the ratios tell
    share = _percent(row.wire_share) if has_wire else _ratio(row.time_us, memcpy_us)
    return (
        f" {row.nbytes:>9} {row.count:>9} {row.dtype:<8} {row.op or '-':<7}"
        f"{_form(by_place.get(False))}{_form(by_place.get(True))}"
        f" {_ratio(row.p99_us, row.call_p50_us):>5} {share:>5} {row.label}"
    )


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


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.0f}%"
