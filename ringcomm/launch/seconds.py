"""The type of options of `ringcomm` that take seconds."""

from __future__ import annotations

import argparse
import math


def seconds(text: str) -> float:
    """Return a finite number of seconds, 0 or more. Raises ArgumentTypeError for other texts."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds >= 0")
    return number
