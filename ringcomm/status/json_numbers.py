"""Numbers as JSON, which lacks some of them."""

from __future__ import annotations

import math


def json_number(number: float) -> float | str:
    """Return the number, or the name of one that JSON lacks: "nan", "inf", "-inf"."""
    return number if math.isfinite(number) else str(number)
