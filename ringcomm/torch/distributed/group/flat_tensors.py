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


def write_parts(xs: Sequence[torch.Tensor], line: torch.Tensor) -> None:
    start = 0
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
    return torch.cat([flatten(x) for x in xs])


def unless_equal(counts: Sequence[int]) -> Sequence[int] | None:
    return None if len(set(counts)) <= 1 else counts
