"""Gradients in fused buckets: few large messages instead of many small ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ringcomm.collectives.fusion import Item, plan_fusion

MIB = 1 << 20


def plan_buckets(sizes: Sequence[tuple[int, object]], max_nbytes: float) -> list[list[int]]:
    """Return which tensors share a bucket; pure, so that every rank comes to the same plan.

    Args:
        sizes: (bytes, dtype) of each tensor, in order of registration.
        max_nbytes: a bucket is closed when the next tensor would take it beyond; a tensor that is
            larger has a bucket of its own.

    Returns:
        Indices, last tensor first: backward produces gradients roughly in that order.
    """
    last_first = [Item(nbytes, dtype) for nbytes, dtype in reversed(sizes)]
    return [
        [len(sizes) - 1 - index for index in batch] for batch in plan_fusion(last_first, max_nbytes)
    ]


@dataclass(frozen=True)
class Member:
    """A parameter's place in its bucket."""

    index: int  # in order of registration
    parameter: torch.nn.Parameter
    view: torch.Tensor  # of the bucket's buffer, in the parameter's shape


class Bucket:
    """A flat buffer with a view for the gradient of each of its parameters.

    Attributes:
        buffer: shape (elements of all members,).
        members: who is in it, in order.
    """

    def __init__(self, parameters: Sequence[tuple[int, torch.nn.Parameter]]) -> None:
        counts = [p.numel() for _, p in parameters]
        self.buffer = torch.zeros(sum(counts), dtype=parameters[0][1].dtype)
        pieces = torch.split(self.buffer, counts)
        self.members = [
            Member(index, p, piece.view(p.shape))
            for (index, p), piece in zip(parameters, pieces, strict=True)
        ]

    def fill(self, is_present: Sequence[bool]) -> None:
        """Copy the gradients in; one that is not present counts as zeros."""
        for member in self.members:
            gradient = member.parameter.grad
            if is_present[member.index] and gradient is not None:
                member.view.copy_(gradient)
            else:
                member.view.zero_()

    def empty(self, is_present: Sequence[bool]) -> None:
        """Copy the buffer back into the gradients that are present; their tensors stay."""
        for member in self.members:
            gradient = member.parameter.grad
            if is_present[member.index] and gradient is not None:
                gradient.copy_(member.view)


def make_buckets(parameters: Sequence[torch.nn.Parameter], max_nbytes: float) -> list[Bucket]:
    """Return the buckets of these parameters, in the order in which they are reduced."""
    sizes = [(p.numel() * p.element_size(), p.dtype) for p in parameters]
    return [
        Bucket([(index, parameters[index]) for index in indices])
        for indices in plan_buckets(sizes, max_nbytes)
    ]


def names_of(buckets: Sequence[Bucket], names: Sequence[str]) -> Iterator[str]:
    """Yield a name for each bucket: its first parameter, and how many more it holds."""
    for bucket in buckets:
        more = len(bucket.members) - 1
        yield names[bucket.members[0].index] + (f"+{more}" if more else "")
