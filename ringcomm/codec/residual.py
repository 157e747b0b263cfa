"""Error feedback: adds the values that compression dropped to the next gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringcomm.codec.base import Codec
from ringcomm.codec.encoded_header import Buffer, Bytes, Floats, dtype_of, read_header


@dataclass(slots=True)
class _KeptPart:
    dropped: Floats  # float32 or float64, in the units of gradients that are applied with `lr`
    lr: float | None


class Residual:
    """Keeps the values that a codec dropped of each tensor, and adds them to the next gradient.

    The kept values are the residual of the tensor. No value is lost: for each name, the sum of all
    decoded arrays plus the residual is the sum of all gradients, up to rounding. With `lr`, this
    holds for the sums of lr * decoded and of lr * gradient: a residual that was dropped at one rate
    and is sent at another is scaled by old / new. For a server that applies lr * decoded, that is
    EF-SGD (Karimireddy et al. 2019, arXiv:1901.09847, algorithm 2) on any schedule; for a server
    with momentum or adaptive rates it is an approximation.

    A Residual is for one sender of gradients, one thread at a time. For float16 it is in float32.

    Attributes:
        codec: any codec. TopK needs a Residual; Int8 and BF16 gain from one.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._kept: dict[str, _KeptPart] = {}
        self._scratch = (_Scratch(), _Scratch())

    def encode(
        self,
        name: str,
        x: Floats,
        *,
        lr: float | None = None,
        draw: int | None = None,
        out: Bytes | None = None,
        absent: Sequence[slice] = (),
    ) -> Bytes:
        """Return x plus the residual, encoded; the values that encoding drops are the new residual.

        In two cases, encode() sends x alone, and leaves the residual for later. One is lr = 0: the
        server ignores this push. The other is that x plus the residual is too large for the codec
        or the dtype, as it may be in FP16 when a schedule ends near 0. If x alone is decoded as NaN
        or inf, the buffer carries these, and the residual stays as it was.

        Args:
            name: name of the tensor. The first call with it determines count and dtype.
            x: array as for Codec.encode(). It is only read.
            lr: the factor with which the server applies this push, 0 or more. None if it is not
                known or never changes. Divide it by the loss scale if gradients are scaled.
            draw, out: random number and buffer, as for Codec.encode().
            absent: parts of x that are not sent. Their residual stays; x must be 0 there.

        Raises:
            ValueError: count or dtype differ from earlier calls with this name; lr was passed only
                in some of the calls; lr is negative or not finite.
        """
        dtype_of(x, f"residual[{name}]")
        kept = self._find(name, x.size, x.dtype, lr)
        if kept is not None and lr != 0:
            ratio = _ratio(kept.lr, lr)
            buffer, dropped = self._send(x, kept.dropped, ratio, draw=draw, out=out, absent=absent)
            if np.isfinite(dropped).all():
                kept.dropped[:], kept.lr = dropped, lr
                return buffer
        buffer, dropped = self._send(x, None, 1.0, draw=draw, out=out, absent=absent)
        if lr != 0 and np.isfinite(dropped).all():
            self._keep(name, kept, dropped, lr)
        return buffer

    def give_back(self, name: str, buffer: Buffer, *, lr: float | None = None) -> None:
        """Add to the residual a push that was not applied, so that the next push sends it.

        For a push that came too late, or whose step was skipped. The sums are as if that push had
        never been sent.

        Args:
            name, lr: name of the tensor and factor, the same as in the call of encode().
            buffer: the result of encode(). A buffer with NaN or inf is ignored.

        Raises:
            ValueError: the buffer's count or dtype differ from earlier calls with this name, or lr
                was passed only in some of the calls.
            CodecError: the codec did not write the buffer.
        """
        header = read_header(buffer)
        dtype = np.dtype(header.dtype.name)
        kept = self._find(name, header.count, dtype, lr)
        out = self._scratch[1].take(header.count, dtype)
        self.codec.decode(buffer, out)
        if lr != 0 and np.isfinite(out).all():
            self._keep(name, kept, out, lr)

    def forget(self, name: str) -> None:
        """Drop the residual, if any, of a tensor that gets new values or another shape."""
        self._kept.pop(name, None)

    def state_dict(self) -> dict[str, dict[str, NDArray[Any]]]:
        """Return copies: {"dropped": {name: residual}, "lr": {name: rate}}.

        Residuals are in the units of gradients that are applied with the rate: float32 or float64,
        shape (count,). Rates have shape (), and are absent if encode() was called without lr.
        """
        rated = {name: kept.lr for name, kept in self._kept.items() if kept.lr is not None}
        return {
            "dropped": {name: kept.dropped.copy() for name, kept in self._kept.items()},
            "lr": {name: np.array(lr) for name, lr in rated.items()},
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, NDArray[Any]]]) -> None:
        """Replace all residuals by those of a state_dict().

        Raises:
            ValueError: this is not such a state. Nothing was changed.
        """
        if set(state) != {"dropped", "lr"} or not set(state["lr"]) <= set(state["dropped"]):
            raise ValueError(
                f"residual: a state has 'dropped' and 'lr', and each name in 'lr' is in 'dropped'; "
                f"this state has {sorted(state)}. Pass what state_dict() returned"
            )
        rates = {name: float(lr) for name, lr in state["lr"].items()}
        self._kept = {
            name: _KeptPart(_checked(name, dropped).copy(), _checked_rate(name, rates.get(name)))
            for name, dropped in state["dropped"].items()
        }

    def _find(
        self, name: str, count: int, dtype: np.dtype[Any], lr: float | None
    ) -> _KeptPart | None:
        _require_rate(name, lr)
        kept = self._kept.get(name)
        if kept is None:
            return None
        if kept.dropped.size != count or kept.dropped.dtype != _kept_in(dtype):
            raise ValueError(
                f"residual[{name}]: got {count} {dtype}, after {kept.dropped.size} "
                f"{kept.dropped.dtype}. Use a name for each tensor, or forget() this one"
            )
        if (kept.lr is None) != (lr is None):
            raise ValueError(
                f"residual[{name}]: got lr={lr}, after {kept.lr}. Pass lr always or never"
            )
        return kept

    def _send(
        self,
        x: Floats,
        residual: Floats | None,
        ratio: float,
        *,
        draw: int | None,
        out: Bytes | None,
        absent: Sequence[slice],
    ) -> tuple[Bytes, Floats]:
        """Return x + residual * ratio, encoded, and the dropped values, in scratch memory.

        Absent parts are dropped as a whole.
        """
        total = self._scratch[0].take(x.size, _kept_in(x.dtype))
        decoded = self._scratch[1].take(x.size, x.dtype)
        with np.errstate(over="ignore", invalid="ignore"):  # the caller checks for inf and NaN
            if residual is None:
                total[:] = x
            elif ratio == 1.0:
                np.add(residual, x, out=total)
            else:
                np.multiply(residual, total.dtype.type(ratio), out=total)
                total += x
            unsent = [total[part].copy() for part in absent]
            for part in absent:
                total[part] = 0
            buffer = self.codec.encode(total.astype(x.dtype, copy=False), draw=draw, out=out)
            total -= self.codec.decode(buffer, decoded)
            for part, kept in zip(absent, unsent, strict=True):
                total[part] = kept
        return buffer, total

    def _keep(self, name: str, kept: _KeptPart | None, dropped: Floats, lr: float | None) -> None:
        """Add `dropped` to `kept`, in units of the larger rate, so that no factor is above 1."""
        if kept is None:
            self._kept[name] = _KeptPart(dropped.astype(_kept_in(dropped.dtype)), lr)
        elif lr is None or kept.lr is None or kept.lr >= lr:
            kept.dropped += dropped * kept.dropped.dtype.type(_ratio(lr, kept.lr))
        else:
            kept.dropped *= kept.dropped.dtype.type(_ratio(kept.lr, lr))
            kept.dropped += dropped
            kept.lr = lr


class _Scratch:
    """Reusable memory, as large as the largest tensor so far."""

    def __init__(self) -> None:
        self._bytes: Bytes = np.empty(0, np.uint8)

    def take(self, count: int, dtype: np.dtype[Any]) -> Floats:
        nbytes = count * dtype.itemsize
        if self._bytes.size < nbytes:
            self._bytes = np.empty(nbytes, np.uint8)
        return self._bytes[:nbytes].view(dtype)


def _kept_in(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def _ratio(old: float | None, new: float | None) -> float:
    return 1.0 if old is None or new is None else old / new


def _require_rate(name: str, lr: float | None) -> None:
    if lr is not None and not (lr >= 0 and math.isfinite(lr)):
        raise ValueError(f"residual[{name}]: lr must be finite and not negative, not {lr}")


def _checked_rate(name: str, lr: float | None) -> float | None:
    _require_rate(name, lr)
    if lr == 0:
        raise ValueError(f"residual[{name}]: its state has lr 0, at which no residual is kept")
    return lr


def _checked(name: str, dropped: Floats) -> Floats:
    if dtype_of(dropped, f"residual[{name}]").name == "float16" or not np.isfinite(dropped).all():
        raise ValueError(
            f"residual[{name}]: its state must be finite float32 or float64. "
            "Pass what state_dict() returned"
        )
    return dropped
