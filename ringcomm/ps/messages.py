"""What the meta of requests holds, packed."""

from __future__ import annotations

import json
import struct
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringcomm.errors import RingcommError

_PUSH: Final = struct.Struct("<dQQHBB")
INITIAL, SPARSE, ASSIGN = 1, 2, 4  # flags of a push
ABSENT = 8  # this worker has no gradient in this round
HOLD, RELEASE, SKIP = 16, 32, 64  # keep the mean of the round; make it an update, or drop it
SQUARES: Final = struct.Struct("<d?")  # meta of the answer to HOLD: sum of squares, all finite
MISSING: Final = ("init", "zero", "raise")  # of a sparse pull, by number

READ_BLOCK = 1  # option of a reply: its body is a block that may change, see _core.read_block
WANT_COPY = 1  # option of a pull: send values, not where they are


class PushMeta(NamedTuple):
    """What explains a push.

    Attributes:
        weight: of this contribution to a mean; as a rule the number of samples.
        start: first element of the slice that is pushed.
        n: elements that are pushed, or rows.
        dtype: name of the gradient's.
        flags: INITIAL (values that a table begins with), SPARSE (keys, then rows), ASSIGN, ABSENT,
            HOLD, RELEASE (weight is the factor of the mean), SKIP.
        hyper: hyper-parameters of the updater, float64.
    """

    weight: float
    start: int
    n: int
    dtype: str
    flags: int
    hyper: NDArray[np.float64]

    def packed(self) -> bytes:
        """Return what of() reads."""
        name = self.dtype.encode()
        head = _PUSH.pack(self.weight, self.start, self.n, self.flags, len(name), len(self.hyper))
        return b"".join((head, name, self.hyper.tobytes()))

    @classmethod
    def of(cls, meta: bytes) -> PushMeta:
        """Read it. Raises RingcommError if it is cut off."""
        if len(meta) < _PUSH.size:
            raise RingcommError(f"ps: the meta of a push has {len(meta)} bytes")
        weight, start, n, flags, n_name, n_hyper = _PUSH.unpack_from(meta)
        at = _PUSH.size + n_name
        if len(meta) != at + 8 * n_hyper:
            raise RingcommError(f"ps: the meta of a push has {len(meta)} bytes, not {at}")
        hyper = np.frombuffer(meta, np.float64, n_hyper, at)
        return cls(weight, start, n, meta[_PUSH.size : at].decode(), flags, hyper)


def packed_json(data: Any) -> bytes:
    """Return data as the meta of a control request."""
    return json.dumps(data, separators=(",", ":")).encode()
