"""A picture of a report: time over size, and how much faster each engine is than MPI's own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ringcomm.launch.bench.report import Report, Row

_INCHES = (12.0, 4.5)  # of one row of the picture
_COLORS = {  # the same in every panel, whoever is left out
    "ringcomm reg": "C0",
    "ringcomm": "C9",
    "native": "C1",
    "gloo": "C2",
    "memcpy": "C7",
}


def draw(report: Report, path: Path) -> None:
    """Write the picture to `path`; each collective, dtype and operator is a row of two panels.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # not pyplot, which would look for a screen

    series = _series(report.rows)
    figure: Any = Figure(figsize=(_INCHES[0], _INCHES[1] * max(len(series), 1)), layout="tight")
    panels = figure.subplots(max(len(series), 1), 2, squeeze=False)
    for (title, lines), (left, right) in zip(series.items(), panels, strict=False):
        base = dict(lines.get("native", lines.get("memcpy", ())))
        name = "MPI's" if "native" in lines else "memcpy's"
        for label, points in lines.items():
            style = {"marker": ".", "label": label, "color": _COLORS.get(label)}
            left.loglog(*zip(*points, strict=True), **style)
            speedups = [(x, base[x] / y) for x, y in points if x in base]
            if speedups:
                right.loglog(*zip(*speedups, strict=True), **style)
        _dress(left, f"{title}, {report.size} ranks", "time (us), lower is better")
        _dress(right, report.mpi, f"{name} time / time, higher is better")
    figure.savefig(path)


def _series(rows: Iterable[Row]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Return title -> label -> [(nbytes, us)], in place where the engine has that form."""
    by_form: dict[tuple[str, str], dict[bool, list[tuple[int, float]]]] = {}
    for row in rows:
        if row.time_us is not None and row.nbytes:
            forms = by_form.setdefault((_title(row), row.label), {})
            forms.setdefault(row.in_place, []).append((row.nbytes, row.time_us))
    found: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for (title, label), forms in by_form.items():
        found.setdefault(title, {})[label] = forms.get(True) or forms[False]
    return found


def _title(row: Row) -> str:
    return " ".join(filter(None, (row.collective, row.dtype, row.op)))


def _dress(panel: Any, title: str, what: str) -> None:
    panel.set(title=title, xlabel="size (bytes)", ylabel=what)
    panel.grid(True, which="major", alpha=0.4)
    panel.legend()
