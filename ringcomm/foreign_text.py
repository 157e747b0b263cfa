"""Texts whose author is unknown: cleaned for a terminal, and read as JSON. Pure."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn


def printable(text: str, *, keeps_lines: bool = False) -> str:
    """Return a text for a terminal: without escape sequences and line ends.

    Host names, names of operations and records of other programs may have them, and so could move
    the cursor, hide lines or change what the terminal does.

    Args:
        text: what is to be shown.
        keeps_lines: line ends and tabs stay, for a text of several lines.
    """
    if text.isprintable():
        return text
    kept = "\n\t" if keeps_lines else ""
    return "".join(each if each.isprintable() or each in kept else " " for each in text)


def parsed_json(data: bytes | str, *, has_nan: bool = False) -> Any:
    """Return what JSON says.

    Args:
        data: the text.
        has_nan: NaN and Infinity are taken, which JSON has not; else all numbers are finite.

    Raises:
        ValueError: it is no JSON, or nested too deeply.
    """
    try:
        if has_nan:
            return json.loads(data)
        return json.loads(data, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise ValueError("is no JSON: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"is no JSON: {printable(str(error))}") from error


def is_number(value: Any) -> bool:
    """Return True for an int of 64 bits, or a finite float, as parsed_json() may return them."""
    if type(value) is int:
        return is_int64(value)
    return type(value) is float and math.isfinite(value)


def is_int64(value: Any) -> bool:
    return type(value) is int and -(1 << 63) <= value < 1 << 63


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        _refuse(text)
    return number


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")
