"""Compresses a worker's pushes to one dense table, and keeps what compression dropped."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from numpy.typing import NDArray

from ringcomm.codec import Int8, Residual, draw_number
from ringcomm.ps.compression import is_finite, push_codec
from ringcomm.ps.optim import SGD, Updater
from ringcomm.ps.protocol.frames import Status

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.codec.base import FramedCodec
    from ringcomm.ps.protocol.link import Delivery
    from ringcomm.ps.table_spec import Spec

Array = NDArray[Any]
ReplyHandler = Callable[["Delivery"], None]
Pack = Callable[[int, Array, ReplyHandler], tuple["Bytes", ReplyHandler]]


@dataclass(eq=False, slots=True)
class _SentBlock:
    buffer: Bytes
    rate: float
    values: int  # how often the values had been replaced before
    is_kept: bool = False  # for the next push: it has become no update


class Packer:
    """Encodes pushes, block by block: bits do not depend on how many servers there are.

    With error feedback the part of a block that compression drops is kept here, and goes with the
    next push of the block: the sum of what was decoded, plus what is kept, is the sum of all
    gradients. With SGD that holds for lr * gradient, on any schedule; see codec.Residual.

    Args:
        spec: of a table whose pushes are compressed.
        codec: encodes them.
        sender: number of this worker, from which its random numbers are made.
    """

    def __init__(self, spec: Spec, codec: FramedCodec, sender: int) -> None:
        self._name = spec.name
        self.codec: Final = codec
        self._sender = sender
        self._residual = Residual(codec) if spec.compression["error_feedback"] else None
        self._has_rounds = spec.mode.has_rounds  # of which some become no update
        self._last: dict[int, _SentBlock] = {}  # of each block: what was pushed last
        self._numbers = itertools.count()
        self._values = 0  # how often they have been replaced
        self._lock = threading.Lock()

    @classmethod
    def of(cls, spec: Spec, sender: int) -> Packer | None:
        codec = push_codec(spec.compression)
        return None if codec is None else cls(spec, codec, sender)

    def prepared(self, x: Array, spec: Spec, *, may_have_nan: bool) -> Array:
        """Return a push as it is to be encoded.

        Args:
            x: flat; any of the dtypes that the table takes.
            spec: of the table.
            may_have_nan: the mean is checked for NaN and inf before it counts.

        Raises:
            ValueError: x is a part of the table, and error feedback needs all of it; or x has NaN
                or inf that the codec would spread over its block.
        """
        if self._residual is not None and len(x) < spec.count:
            raise ValueError(
                f"push[{spec.name}]: where= selects {len(x)} of {spec.count} elements, and this "
                "table has error feedback, which is for all of them. Push all, or open the table "
                "with error_feedback=False and without TopK"
            )
        x = x.astype(spec.dtype, copy=False)
        if isinstance(self.codec, Int8) and not may_have_nan and not is_finite(x):
            raise ValueError(
                f"push[{spec.name}]: NaN or inf among the {x.size} elements, which int8 would "
                f"spread over blocks of {self.codec.block}. Look where they come from; where a "
                "GradScaler makes them, let the optimizer know it: scaler="
            )
        return x

    def packing(
        self, rate: float, memory: Mapping[int, Bytes], absent: Callable[[int], Sequence[slice]]
    ) -> Pack:
        """Return the function that encodes the pieces of one push: pack(block, piece, on_reply).

        It returns the piece, encoded, and what takes the reply in the place of on_reply. With error
        feedback a piece is all of its block.

        Args:
            rate: see rate_of().
            memory: for each block, see FramedCodec.encoded_nbytes().
            absent: returns the parts of a block that have no gradient: what is kept of them stays.
        """
        number = next(self._numbers)

        def pack(part: int, piece: Array, on_reply: ReplyHandler) -> tuple[Bytes, ReplyHandler]:
            sent = self._encode(part, piece, number, rate, memory[part], absent=absent(part))

            def on_outcome(reply: Delivery) -> None:
                if reply.header.status == Status.LATE:
                    self._take_back(part, sent)
                on_reply(reply)

            return sent.buffer, on_outcome

        return pack

    def _encode(
        self, part: int, piece: Array, number: int, rate: float, out: Bytes,
        *, absent: Sequence[slice],
    ) -> _SentBlock:  # fmt: skip
        draw = 0
        if isinstance(self.codec, Int8):
            draw = draw_number("push", self._name, self._sender, part, number)
        if self._residual is None:
            return _SentBlock(self.codec.encode(piece, out=out, draw=draw), rate, self._values)
        with self._lock:
            buffer = self._residual.encode(
                str(part), piece, lr=rate, draw=draw, out=out, absent=absent
            )
            sent = _SentBlock(buffer, rate, self._values)
            if self._has_rounds:
                self._last[part] = sent
        return sent

    def _take_back(self, part: int, sent: _SentBlock) -> None:
        """Keep a push of a block for the next one: once, if it was late and its round skipped.

        A gradient of values that were replaced since then is dropped.
        """
        if self._residual is None:
            return
        with self._lock:
            if not sent.is_kept and sent.values == self._values:
                sent.is_kept = True
                self._residual.give_back(str(part), sent.buffer, lr=sent.rate)

    def take_all_back(self) -> None:
        for part, sent in tuple(self._last.items()):
            self._take_back(part, sent)

    def send_nothing(self) -> None:
        """Note that the last push has no gradient: there is none to keep if it does not count."""
        with self._lock:
            self._last.clear()

    def forget(self) -> None:
        """Drop what is kept, for the values were replaced."""
        if self._residual is not None:
            with self._lock:
                self._values += 1
                self._last.clear()
                self._residual.load_state_dict({"dropped": {}, "lr": {}})

    def write_residual(self, out: Array, bounds: Sequence[int], rate: float) -> None:
        """Write what is kept to `out`, a flat table, as a gradient at this rate."""
        if self._residual is None:
            return
        with self._lock:
            state = self._residual.state_dict()
        for part, kept in state["dropped"].items():
            lr = float(state["lr"][part])
            block = slice(bounds[int(part)], bounds[int(part) + 1])
            out[block] = kept * (lr / rate if rate else 1.0)


def rate_of(updater: Updater, scale: float) -> float:
    """Return the factor by which servers multiply a gradient of this scale; 1 / scale if unknown.

    It is known for SGD alone: the update of other updaters is no multiple of a sum of gradients.

    Args:
        updater: with the hyper-parameters of now.
        scale: by which the gradient has been multiplied.
    """
    return (updater.lr if isinstance(updater, SGD) else 1.0) / scale
