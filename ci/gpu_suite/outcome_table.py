"""A table of cases with what is wrong in each, so that no failure hides another."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field


@dataclass
class Matrix:
    """How many cases of each row and column were right; the first error of each."""

    tried: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    errors: dict[tuple[str, str], list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, row: str, column: str, error: str) -> None:
        """Note the outcome of a case; "": it was right."""
        self.tried[row, column] += 1
        if error:
            self.errors[row, column].append(error)

    @property
    def n_cases(self) -> int:
        return sum(self.tried.values())

    @property
    def n_wrong(self) -> int:
        return sum(map(len, self.errors.values()))

    def lines(self) -> list[str]:
        """Return the table: "12" cases were right, or "2/12" were wrong; then the first errors."""
        rows, columns = (list(dict.fromkeys(key[i] for key in self.tried)) for i in (0, 1))
        width = max(map(len, rows), default=0)
        widths = [max(len(column), 7) for column in columns]
        heads = (f"{c:>{w}}" for c, w in zip(columns, widths, strict=True))
        found = [f"{'':<{width}} {' '.join(heads)}"]
        for row in rows:
            cells = (f"{self._cell(row, c):>{w}}" for c, w in zip(columns, widths, strict=True))
            found.append(f"{row:<{width}} {' '.join(cells)}")
        return found + [
            f"{row}, {column}: {errors[0]}" for (row, column), errors in self.errors.items()
        ]

    def _cell(self, row: str, column: str) -> str:
        n_tried, n_wrong = self.tried.get((row, column), 0), len(self.errors.get((row, column), ()))
        if not n_tried:
            return "-"
        return f"{n_wrong}/{n_tried}!" if n_wrong else str(n_tried)
