"""Measurements of `ringcomm tune` on one topology, and their text form. Pure."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_FORMAT = 1


@dataclass(frozen=True, eq=False)
class Table:
    """Seconds by collective, nbytes (ascending) and algorithm."""

    layout: str  # of ranks over hosts, see layout.describe()
    implementation: str  # the MPI library
    version: str  # of ringcomm
    seconds: Mapping[str, Mapping[int, Mapping[str, float]]]

    def at(self, collective: str, nbytes: int) -> dict[str, float]:
        """Return seconds by algorithm: linear between the sizes measured, and beyond the largest.

        Empty if the collective was not measured.
        """
        rows = self.seconds.get(collective, {})
        if not rows:
            return {}
        sizes = list(rows)
        place = bisect_left(sizes, nbytes)
        if place == 0:
            return dict(rows[sizes[0]])
        if place == len(sizes):
            return {name: s * nbytes / sizes[-1] for name, s in rows[sizes[-1]].items()}
        below, above = sizes[place - 1], sizes[place]
        share = (nbytes - below) / (above - below)
        return {
            name: (1 - share) * rows[below][name] + share * rows[above][name]
            for name in rows[below]
            if name in rows[above]
        }

    def dumps(self) -> str:
        """Return the text form, JSON."""
        return json.dumps({"format": _FORMAT, **vars(self)}, indent=2) + "\n"

    @classmethod
    def loads(cls, text: str) -> Table:
        """Read the text form.

        Raises:
            ValueError: it is not such a table; the text says what is wrong with it.
        """
        content = json.loads(text)
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise ValueError(f"it is no tuning table of format {_FORMAT}")
        wanted = {"layout": str, "implementation": str, "version": str, "seconds": dict}
        wrong = [name for name, kind in wanted.items() if not isinstance(content.get(name), kind)]
        if wrong:
            raise ValueError(f"it lacks {', '.join(wrong)}")
        seconds = {name: _rows(rows) for name, rows in content["seconds"].items()}
        return cls(content["layout"], content["implementation"], content["version"], seconds)


def _rows(rows: Any) -> dict[int, dict[str, float]]:
    """Return the times by size, ascending, and algorithm."""
    try:
        found = {
            int(nbytes): {str(name): float(s) for name, s in row.items()}
            for nbytes, row in rows.items()
        }
    except (AttributeError, TypeError) as error:
        raise ValueError(f"its times are not by size and algorithm: {error}") from error
    if not all(0 < s < math.inf for row in found.values() for s in row.values()):
        raise ValueError("it holds times that are not positive")
    return dict(sorted(found.items()))
