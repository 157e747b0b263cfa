"""Values that ranks compare by one BOR reduction: each is sent with its complement. Pure."""

from __future__ import annotations


def with_complement(value: bytes) -> bytes:
    """Return the message of one rank; is_alike() reads the BOR of all ranks' messages."""
    return value + bytes(byte ^ 0xFF for byte in value)


def is_alike(combined: bytes) -> bool:
    half = len(combined) // 2
    return not any(a & b for a, b in zip(combined[:half], combined[half:], strict=True))
