"""Codecs by their names, and the codec that an argument `compression` means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ringcomm.codec.base import Codec, FramedCodec
from ringcomm.codec.cast import BF16, FP16, Identity
from ringcomm.codec.int8 import Int8
from ringcomm.codec.topk import TopK

_BY_WORD: Final[Mapping[str, FramedCodec]] = {"fp16": FP16(), "bf16": BF16(), "int8": Int8()}
KINDS: Final[Mapping[str, type[Any]]] = {
    kind.__name__: kind for kind in (Identity, FP16, BF16, Int8, TopK)
}


def codec_of(label: str, compression: str | Codec | None) -> FramedCodec | None:
    """Return the codec that a user means by "fp16", "bf16", "int8", or a codec; None: none.

    Raises:
        ValueError: it is neither.
    """
    if compression is None:
        return None
    if isinstance(compression, str):
        if compression in _BY_WORD:
            return _BY_WORD[compression]
    elif type(compression) in KINDS.values():
        assert isinstance(compression, FramedCodec)
        return compression
    words = ", ".join(map(repr, _BY_WORD))
    raise ValueError(
        f"{label}: compression is {compression!r}; it must be None, {words}, or one of ringcomm's "
        "codecs, as codec.TopK(0.01)"
    )
