"""Tensors as c10d takes them, as the engine takes them: one line of elements of a known dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ringcomm.arrays.dtypes import DTYPES

_KNOWN = {getattr(torch, name) for name in DTYPES if hasattr(torch, name)}


def flatten(x: torch.Tensor) -> torch.Tensor:
    """Return x's elements in C order, as one dimension: x's own memory where it has that order.

    c10d compares how many elements there are, not their shape.
    """
    if x.dim() == 1 and not x.requires_grad and x.is_contiguous():
        return x
    plain = x.detach()
    if plain.is_contiguous() and not plain.is_conj() and not plain.is_neg():
        return plain.view(-1)
    return plain.resolve_conj().resolve_neg().contiguous().view(-1)


def bytes_of(line: torch.Tensor) -> torch.Tensor:
    """Return a line as the engine can move it: of a dtype that it does not know, the bytes."""
    return line if line.dtype in _KNOWN else line.view(torch.uint8)


def write_back(x: torch.Tensor, line: torch.Tensor) -> None:
    """Fill x with the elements of a line, which may be its own memory."""
    if line.data_ptr() != x.data_ptr():
        with torch.no_grad():
            x.copy_(line.view(x.dtype).view(x.shape))


def write_parts(xs: Sequence[torch.Tensor], line: torch.Tensor) -> None:
    """Fill each of xs with its part of a line, one after another."""
    start = 0
    with torch.no_grad():
        for x in xs:
            x.copy_(line[start : start + x.numel()].view(x.shape))
            start += x.numel()


def concatenate(xs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the elements of all xs as one line, in memory of its own."""
    return torch.cat([flatten(x) for x in xs])


def unless_equal(counts: Sequence[int]) -> Sequence[int] | None:
    """Return None where all counts are the same, else the counts."""
    return None if len(set(counts)) <= 1 else counts
