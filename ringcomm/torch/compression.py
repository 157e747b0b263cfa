"""Compressors: they turn a tensor into a smaller one, which is sent."""

from __future__ import annotations

from typing import Protocol

import torch


class Compressor(Protocol):
    """Turns a tensor into what is sent, and what was received back."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Return what is to be sent, and what decompress() needs to know."""
        ...

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        """Return what was received in the form of what was sent."""
        ...


class NoneCompressor:
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Return the tensor."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        """Return the tensor."""
        del ctx
        return tensor


class _Cast:
    """Sends wider floating-point tensors in a 16-bit dtype; others as they are."""

    wire: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Return the tensor in 16 bits, and its own dtype; sums are computed in float32."""
        is_wider = tensor.dtype.is_floating_point and tensor.dtype.itemsize > cls.wire.itemsize
        return (tensor.to(cls.wire), tensor.dtype) if is_wider else (tensor, None)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        """Return the tensor in its own dtype."""
        return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(_Cast):
    """float16: 11 bits of precision; magnitudes above 65504 become infinite."""

    wire = torch.float16


class BF16Compressor(_Cast):
    """bfloat16: 8 bits of precision, the range of float32."""

    wire = torch.bfloat16


class Compression:
    """Values of the argument `compression`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def compress(
    compression: Compressor, tensor: torch.Tensor
) -> tuple[torch.Tensor, torch.dtype | None]:
    """Return what a compressor makes of a tensor. Raises TypeError for anything else."""
    if not hasattr(compression, "decompress"):
        raise TypeError(f"compression is one of hvd.Compression, not {compression!r}")
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"hvd's collectives take torch tensors, not {type(tensor).__qualname__}")
    return compression.compress(tensor)
