"""Turns tensors into flat tensors ("lines") of a dtype that the engine knows, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ringcomm.arrays.dtypes import DTYPES
from ringcomm.arrays.torch import writing

_KNOWN = {getattr(torch, name) for name in DTYPES if hasattr(torch, name)}


def flatten(x: torch.Tensor) -> torch.Tensor:
    """Return x's elements in C order as a flat tensor: a view of x if x is contiguous.

    Ranks may pass tensors of different shapes: c10d compares the numbers of elements alone.
    """
    if x.dim() == 1 and not x.requires_grad and x.is_contiguous():
        return x
    plain = x.detach()
    if plain.is_contiguous() and not plain.is_conj() and not plain.is_neg():
        return plain.view(-1)
    return plain.resolve_conj().resolve_neg().contiguous().view(-1)


def bytes_of(line: torch.Tensor) -> torch.Tensor:
    return line if line.dtype in _KNOWN else line.view(torch.uint8)


def write_back(x: torch.Tensor, line: torch.Tensor) -> None:
    if line.data_ptr() != x.data_ptr():
        keep_while_read(line)
        with writing(x):
            x.copy_(line.view(x.dtype).view(x.shape))


def line_over(xs: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return a view of tensors that lie one after another in memory, as of chunk(); else None."""
    first = xs[0]
    end, memory = first.data_ptr(), first.untyped_storage().data_ptr()
    for x in xs:
        if (
            x.data_ptr() != end
            or x.dtype != first.dtype
            or not x.is_contiguous()
            or x.is_conj()
            or x.is_neg()
            or x.untyped_storage().data_ptr() != memory
        ):
            return None
        end += x.nbytes
    n = (end - first.data_ptr()) // first.element_size()
    return first.detach().as_strided((n,), (1,))


def line_for(xs: Sequence[torch.Tensor], source: torch.Tensor | None = None) -> torch.Tensor:
    """Return a line for values of tensors: their memory, or new memory, apart from `source`."""
    line = line_over(xs) if xs else None
    if line is None or (source is not None and is_shared(line, source)):
        n = sum(x.numel() for x in xs)
        return xs[0].new_empty(n) if xs else torch.empty(n)
    return line


def is_shared(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return True if two lines have memory in common."""
    at, other = x.data_ptr(), y.data_ptr()
    return at < other + y.nbytes and other < at + x.nbytes


def write_parts(xs: Sequence[torch.Tensor], line: torch.Tensor) -> None:
    """Copy a line into tensors, unless it is their memory."""
    start = 0
    if xs and xs[0].data_ptr() == line.data_ptr():
        return
    keep_while_read(line)
    for x in xs:
        with writing(x):
            x.copy_(line[start : start + x.numel()].view(x.shape))
        start += x.numel()


def keep_while_read(line: torch.Tensor) -> None:
    """Keep the memory of a line on a GPU until the current stream, which reads it, has done so.

    The line may have been made while another stream was current.
    """
    if line.is_cuda:
        line.record_stream(torch.cuda.current_stream(line.device))


def concatenate(xs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the elements of tensors in one line, which may be their memory."""
    line = line_over(xs) if xs else None
    return torch.cat([flatten(x) for x in xs]) if line is None else line


def unless_equal(counts: Sequence[int]) -> Sequence[int] | None:
    return None if len(set(counts)) <= 1 else counts
