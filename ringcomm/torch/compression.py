"""Compression of the tensors that ranks reduce: the values of the argument `compression`.

The codecs (ringcomm.codec) are the one list of ways to send fewer bytes. Ranks add what was sent,
so they use the codecs that send numbers: Identity, FP16 and BF16. hvd.Compression has these by
Horovod's names. A compressor turns a tensor into the tensor to send, and back; for a whole bucket,
BucketReduction (ringcomm/torch/optim/buckets.py) does so.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch

from ringcomm.codec import BF16, FP16, Identity
from ringcomm.codec.named_codecs import codec_of


class Compressor(Protocol):
    """Type of Compression.none, fp16 and bf16, and of compressors that scripts define."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor to send, and the argument `ctx` of decompress()."""
        ...

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor: ...


class _CastCompressor:
    """Sends floating-point tensors of a wider dtype in the codec's dtype, others unchanged."""

    codec: ClassVar[Identity | FP16 | BF16]
    wire: ClassVar[torch.dtype]

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Return the tensor in the codec's dtype, and its own. Ranks add 16 bits in float32."""
        is_wider = tensor.dtype.is_floating_point and tensor.dtype.itemsize > cls.wire.itemsize
        return (tensor.to(cls.wire), tensor.dtype) if is_wider else (tensor, None)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class NoneCompressor(_CastCompressor):
    """Sends tensors unchanged."""

    codec, wire = Identity(), torch.float64


class FP16Compressor(_CastCompressor):
    """float16: 11 bits of precision; magnitudes above 65504 become infinite."""

    codec, wire = FP16(), torch.float16


class BF16Compressor(_CastCompressor):
    """bfloat16: 8 bits of precision, the range of float32."""

    codec, wire = BF16(), torch.bfloat16


class Compression:
    """The values of the argument `compression`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


_BY_CODEC: dict[object, type[_CastCompressor]] = {
    each.codec: each for each in (NoneCompressor, FP16Compressor, BF16Compressor)
}


def compressor_of(label: str, compression: Any) -> Compressor:
    """Return the compressor that a user means by hvd.Compression, None, "fp16", "bf16" or a codec.

    Anything with compress() and decompress() is a compressor itself.

    Raises:
        ValueError: it is nothing of these, or ranks cannot add what the codec sends.
    """
    if callable(getattr(compression, "compress", None)) and hasattr(compression, "decompress"):
        found: Compressor = compression
        return found
    codec = codec_of(label, compression)
    if codec is not None and codec not in _BY_CODEC:
        raise ValueError(
            f"{label}: compression is {codec}, and what it sends cannot be added by the ranks; "
            "parameter servers take it. Pass hvd.Compression.none, fp16 or bf16"
        )
    return NoneCompressor if codec is None else _BY_CODEC[codec]


def name_of(compressor: Any) -> str:
    """Return a text that is equal for equal compressors, by which the ranks compare theirs.

    Of the attributes of a script's own class and object, it has the numbers, texts and dtypes.
    """
    if compressor in _BY_CODEC.values():
        return repr(compressor.codec)
    kind = compressor if isinstance(compressor, type) else type(compressor)
    owners = [*map(vars, reversed(kind.__mro__)), getattr(compressor, "__dict__", {})]
    settings = {name: value for each in owners for name, value in each.items()}
    values = [
        f"{name}={value!r}"
        for name, value in sorted(settings.items())
        if isinstance(value, _COMPARED) and not name.startswith("__")
    ]
    return f"{kind.__module__}.{kind.__qualname__}({', '.join(values)})"


_COMPARED = (bool, int, float, str, torch.dtype)  # their texts are the same on all ranks
