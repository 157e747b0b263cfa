"""Types of options of `ringcomm`, for argparse; each raises ArgumentTypeError for other texts."""

from __future__ import annotations

import argparse
import math


def seconds(text: str) -> float:
    """Return a finite number of seconds, 0 or more."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds >= 0")
    return number


def port(text: str) -> int:
    """Return the number of a TCP port; 0 means a free one."""
    if not (text.isdecimal() and int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: a number from 0 to 65535")
    return int(text)
