"""The reduction of a bucket in the form in which a compressor sends it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ringcomm.collectives.operators import Op
from ringcomm.engine.api import collectives
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.handle import Handle
from ringcomm.torch.compression import Compressor


class BucketReduction:
    """Reduces one bucket, step after step.

    It lasts as long as its bucket, so it may keep values from one step for the next.

    Args:
        compressor: the same on all ranks; see compression.name_of().
        name: name of the messages.
        is_scattered: each rank gets its chunk of the result, not all of it.
    """

    # Set by launch():
    _sent: torch.Tensor
    _context: Any
    _op: Op

    def __init__(self, compressor: Compressor, name: str, *, is_scattered: bool) -> None:
        self._compressor, self._name, self._is_scattered = compressor, name, is_scattered

    def launch(self, bucket: torch.Tensor, op: Op, group: Group) -> Handle[torch.Tensor]:
        """Start to reduce a bucket, which must not change until the handle is done."""
        self._op = op
        self._sent, self._context = self._compressor.compress(bucket)
        return _launch(self._sent, op, self._name, group, is_scattered=self._is_scattered)

    def land(self) -> torch.Tensor:
        """Return the result in the bucket's dtype, once the handle is done."""
        return self._compressor.decompress(self._sent, self._context)

    def has_copied(self, bucket: torch.Tensor) -> bool:
        """Return True if the reduction under way leaves the bucket as it is."""
        return self._sent.untyped_storage().data_ptr() != bucket.untyped_storage().data_ptr()

    @property
    def description(self) -> BucketDescription:
        return BucketDescription(
            self._name,
            self._sent.numel(),
            str(self._sent.dtype).removeprefix("torch."),
            self._op.value,
            self._is_scattered,
            self._sent.device.type,
        )


@dataclass(frozen=True, order=True)
class BucketDescription:
    """The data that a rank needs to take part in the reduction of a bucket that it lacks."""

    name: str
    count: int
    dtype: str
    op: str
    is_scattered: bool
    device: str  # "cpu" or "cuda"

    def launch_zeros(self, group: Group) -> Handle[torch.Tensor]:
        """Take part with zeros, so that the other ranks need not wait for this one."""
        zeros = torch.zeros(self.count, dtype=getattr(torch, self.dtype), device=self.device)
        return _launch(zeros, Op(self.op), self.name, group, is_scattered=self.is_scattered)


def _launch(
    sent: torch.Tensor, op: Op, name: str, group: Group, *, is_scattered: bool
) -> Handle[torch.Tensor]:
    if is_scattered:
        return collectives.reduce_scatter_async_(sent, op, name=name, group=group)
    return collectives.allreduce_async_(sent, op, name=name, group=group)
