"""Compression of pushes and pulls: from the user's arguments to a table's spec, and to codecs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringcomm.codec import Codec, Int8, TopK
from ringcomm.codec.base import FramedCodec
from ringcomm.codec.named_codecs import KINDS, codec_of

Array = NDArray[Any]


def spec_of(
    label: str,
    push: str | Codec | None,
    pull: str | Codec | None,
    *,
    error_feedback: bool | None = None,
    is_dense: bool = True,
) -> dict[str, Any]:
    """Return the entry for compression of a table's spec; empty if there is none.

    Args:
        label: "table[w]".
        push: what pushes are compressed with.
        pull: likewise.
        error_feedback: what pushes drop is kept and goes with the next; None: of TopK alone.
        is_dense: of a dense table; rows of others go without error feedback.

    Raises:
        ValueError: it cannot be done.
    """
    pushes, pulls = codec_of(label, push), codec_of(label, pull)
    if isinstance(pulls, TopK):
        raise ValueError(
            f"{label}: pull_compression is {pulls}, with which most values would read as 0. Use "
            "'fp16', 'bf16' or 'int8'"
        )
    if isinstance(pushes, TopK) and (not is_dense or error_feedback is False):
        raise ValueError(
            f"{label}: compression is {pushes}, and what it drops is lost without error feedback, "
            + ("which dense tables have. " if not is_dense else "which is switched off. ")
            + "Use 'fp16', 'bf16' or 'int8'"
        )
    if error_feedback and pushes is None:
        raise ValueError(f"{label}: error_feedback without compression= has nothing to do")
    if pushes is None and pulls is None:
        return {}
    has_feedback = isinstance(pushes, TopK) if error_feedback is None else error_feedback
    return {"push": _to_json(pushes), "error_feedback": has_feedback, "pull": _to_json(pulls)}


def push_codec(compression: Mapping[str, Any]) -> FramedCodec | None:
    return _from_json(compression.get("push"))


def pull_codec(compression: Mapping[str, Any]) -> FramedCodec | None:
    return _from_json(compression.get("pull"))


def for_rows(codec: FramedCodec | None, dim: int) -> FramedCodec | None:
    """Return a codec that gives each row of `dim` columns a scale of its own."""
    return dataclasses.replace(codec, block=dim) if isinstance(codec, Int8) else codec


def _to_json(codec: FramedCodec | None) -> dict[str, Any] | None:
    if codec is None:
        return None
    fields: dict[str, Any] = dataclasses.asdict(codec)  # type: ignore[call-overload]  # all are
    return {"codec": type(codec).__name__, **fields}


def _from_json(data: Mapping[str, Any] | None) -> FramedCodec | None:
    if data is None:
        return None
    settings = {name: value for name, value in data.items() if name != "codec"}
    codec: FramedCodec = KINDS[data["codec"]](**settings)
    return codec


def is_finite(x: Array) -> bool:
    return not x.size or bool(np.isfinite(x.min()) and np.isfinite(x.max()))
