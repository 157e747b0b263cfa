"""The times that `ringcomm tune` measured on one topology, and their text form. Pure."""

from __future__ import annotations

import json
import math
import zlib
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ringcomm.foreign_text import is_int64, parsed_json

_FORMAT: Final = 2
_CHECKSUM: Final = ',\n  "crc": '  # ends the text, with the CRC-32 of all before it


@dataclass(frozen=True, eq=False)
class TimeTable:
    """Times on one topology."""

    layout: str  # of ranks over hosts, see ranks_by_host.describe()
    implementation: str  # the MPI library
    version: str  # of ringcomm
    seconds: Mapping[str, Mapping[int, Mapping[str, float]]]  # by collective, nbytes, algorithm

    def at(self, collective: str, nbytes: int) -> dict[str, float]:
        """Return the seconds of each algorithm; {} if the collective was not measured.

        Interpolates between the measured sizes. Beyond the largest, time is proportional to nbytes.
        """
        rows = self.seconds.get(collective, {})
        if not rows:
            return {}
        sizes = list(rows)  # in ascending order
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
        text = json.dumps({"format": _FORMAT, **vars(self)}, indent=2).removesuffix("\n}")
        return text + _checksum_of(text)

    @classmethod
    def loads(cls, text: str) -> TimeTable:
        """Return the table of a text form. Raises ValueError if the text is not valid."""
        try:
            content = parsed_json(text)
        except ValueError as error:
            raise ValueError(f"it {error}") from error
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise ValueError(f"it is no tuning table of format {_FORMAT}")
        wanted = {"layout": str, "implementation": str, "version": str, "seconds": dict}
        wrong = [name for name, kind in wanted.items() if not isinstance(content.get(name), kind)]
        if wrong:
            raise ValueError(f"it lacks {', '.join(wrong)}")
        seconds = {name: _rows(rows) for name, rows in content["seconds"].items()}
        head, _, _ = text.rpartition(_CHECKSUM)
        if text != head + _checksum_of(head):
            raise ValueError("it has changed since it was written")
        return cls(content["layout"], content["implementation"], content["version"], seconds)


def _checksum_of(text: str) -> str:
    """Return the end of a table that begins with `text`."""
    return f"{_CHECKSUM}{zlib.crc32(text.encode())}\n}}\n"


def _rows(rows: Any) -> dict[int, dict[str, float]]:
    """Return the seconds by size, in ascending order, and by algorithm."""
    try:
        found = {
            int(nbytes): {str(name): float(s) for name, s in row.items()}
            for nbytes, row in rows.items()
        }
    except (AttributeError, TypeError) as error:
        raise ValueError(f"its times are not by size and algorithm: {error}") from error
    if not all(0 < s < math.inf for row in found.values() for s in row.values()):
        raise ValueError("it holds times that are not positive")
    if not all(nbytes > 0 and is_int64(nbytes) for nbytes in found):
        raise ValueError("it holds times of arrays that cannot be")
    return dict(sorted(found.items()))
