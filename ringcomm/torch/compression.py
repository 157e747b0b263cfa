"""Compressors, which turn a tensor into a smaller one to send."""

from __future__ import annotations

from typing import Protocol

import torch


class Compressor(Protocol):
    """Type of Compression.none, fp16 and bf16, and of compressors that scripts define."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Return the tensor to send, and the argument `ctx` of decompress()."""
        ...

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        """Return the received tensor in the original dtype."""
        ...


class NoneCompressor:
    """Sends tensors unchanged."""

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
    """Sends floating-point tensors of more than 16 bits in a 16-bit dtype, others unchanged."""

    wire: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Return the tensor in 16 bits, and its original dtype. The ranks add in float32."""
        is_wider = tensor.dtype.is_floating_point and tensor.dtype.itemsize > cls.wire.itemsize
        return (tensor.to(cls.wire), tensor.dtype) if is_wider else (tensor, None)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        """Return the tensor in its original dtype."""
        return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(_Cast):
    """float16: 11 bits of precision; magnitudes above 65504 become infinite."""

    wire = torch.float16


class BF16Compressor(_Cast):
    """bfloat16: 8 bits of precision, the range of float32."""

    wire = torch.bfloat16


class Compression:
    """The values of the argument `compression`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
