"""Values that ranks compare by one BOR reduction: each is sent with its complement. Pure."""

from __future__ import annotations


def with_complement(value: bytes) -> bytes:
    """Return what to combine by BOR, to learn whether all ranks have the same value."""
    return value + bytes(byte ^ 0xFF for byte in value)


def is_alike(combined: bytes) -> bool:
    """Return True if what was combined was the same on all ranks: no bit is both 1 and 0."""
    half = len(combined) // 2
    return not any(a & b for a, b in zip(combined[:half], combined[half:], strict=True))
