"""What the meta of requests holds, packed."""

from __future__ import annotations

import json
import struct
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringcomm.errors import RingcommError

_PUSH: Final = struct.Struct("<dQQHBB")
_STAMP: Final = struct.Struct("<q")
PLACE: Final = struct.Struct("<QQ")  # meta of KNOWN_BLOCK: place in shared memory, bytes
_PULL: Final = struct.Struct("<QQQQQ")
INITIAL, SPARSE, ASSIGN = 1, 2, 4  # flags of a push
ABSENT = 8  # this worker has no gradient in this round
PARTIAL = 128  # behind the hyper-parameters stands which segments have a gradient
HOLD, RELEASE, SKIP = 16, 32, 64  # keep the mean of the round; make it an update, or drop it
SQUARES: Final = struct.Struct("<d?")  # meta of the answer to HOLD: sum of squares, all finite
MEASURED: Final = struct.Struct("<d??")  # of the answer to MEASURE: those, and "yours is in it"
ENCODED: Final = "encoded"  # dtype of a push whose body is what a codec wrote
MISSING: Final = ("init", "zero", "raise")  # of a sparse pull, by number

READ_BLOCK = 1  # option of a reply: its body is a block that may change, see _core.read_block
KNOWN_BLOCK = 2  # likewise, and its meta says where the block is whose values it brings
UNCHANGED = 4  # likewise: there is no body, for nothing has changed
ENCODED_BODY = 16  # option of a reply: its body is what a codec wrote
WANT_COPY = 1  # option of a pull: send values, not where they are
WANT_EXACT = 16  # likewise: whatever pulls are compressed with


COUNT, METADATA, EVICT, MEASURE = 0, 1, 2, 3  # options of a request about rows


class PullMeta(NamedTuple):
    """What explains a pull of rows; its body is their keys, and then, as uint32, `place`s.

    Attributes:
        n: keys.
        missing: what is told of a key without a row, see MISSING.
        n_out: rows of the memory that the rows are written to; 0: they are the reply's body, in the
            order of the keys.
        place: where this memory begins in the client's shared memory. The body says which of its
            rows each key's is; if it does not, they are those of the keys in their order.
        held: number of the snapshot that is read; 0: what is there now.
    """

    n: int
    missing: int
    n_out: int = 0
    place: int = 0
    held: int = 0

    def packed(self) -> bytes:
        """Return what of() reads."""
        return _PULL.pack(*self)

    @classmethod
    def of(cls, meta: bytes) -> PullMeta:
        """Read it. Raises RingcommError if it has another length."""
        if len(meta) != _PULL.size:
            raise RingcommError(f"ps: the meta of a pull has {len(meta)} bytes, not {_PULL.size}")
        return cls._make(_PULL.unpack(meta))


class PushMeta(NamedTuple):
    """What explains a push.

    Attributes:
        weight: of this contribution to a mean; as a rule the number of samples.
        start: first element of the slice that is pushed.
        n: elements that are pushed, or rows.
        dtype: name of the gradient's, or ENCODED.
        flags: INITIAL (values that a table begins with), SPARSE (keys, then rows), ASSIGN, ABSENT,
            HOLD, RELEASE (weight is the factor of the mean), SKIP.
        hyper: hyper-parameters of the updater, float64.
        mask: which segments of the table have a gradient, see segments.packed_mask(); empty: all.
    """

    weight: float
    start: int
    n: int
    dtype: str
    flags: int
    hyper: NDArray[np.float64]
    mask: bytes = b""

    def packed(self) -> bytes:
        """Return what of() reads."""
        name, flags = self.dtype.encode(), self.flags | (PARTIAL if self.mask else 0)
        head = _PUSH.pack(self.weight, self.start, self.n, flags, len(name), len(self.hyper))
        return b"".join((head, name, self.hyper.tobytes(), self.mask))

    @classmethod
    def of(cls, meta: bytes) -> PushMeta:
        """Read it. Raises RingcommError if it is cut off."""
        if len(meta) < _PUSH.size:
            raise RingcommError(f"ps: the meta of a push has {len(meta)} bytes")
        weight, start, n, flags, n_name, n_hyper = _PUSH.unpack_from(meta)
        at = _PUSH.size + n_name
        end = at + 8 * n_hyper
        if len(meta) < end or (len(meta) > end and not flags & PARTIAL):
            raise RingcommError(f"ps: the meta of a push has {len(meta)} bytes, not {end}")
        hyper = np.frombuffer(meta, np.float64, n_hyper, at)
        return cls(weight, start, n, meta[_PUSH.size : at].decode(), flags, hyper, meta[end:])


def packed_json(data: Any) -> bytes:
    """Return data as the meta of a control request."""
    return json.dumps(data, separators=(",", ":")).encode()


def packed_stamp(stamp: int) -> bytes:
    """Return the version of a block as the meta of a reply that says where it is."""
    return _STAMP.pack(stamp)


def stamp_of(meta: bytes) -> int:
    """Read what packed_stamp() wrote."""
    stamp: int = _STAMP.unpack(meta)[0]
    return stamp
