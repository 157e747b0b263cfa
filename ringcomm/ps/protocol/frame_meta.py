"""Packs and reads the meta of frames: of pushes, of pulls, owners, JSON."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringcomm.errors import RingcommError

Owners = NDArray[np.uint32]
_EPOCH: Final = struct.Struct("<Q")
_PUSH: Final = struct.Struct("<dQQHBB")
_STAMP: Final = struct.Struct("<q")
PLACE: Final = struct.Struct("<QQ")  # meta of KNOWN_BLOCK: place in shared memory, bytes
_PULL: Final = struct.Struct("<QQQQQ")
INITIAL, SPARSE, ASSIGN = 1, 2, 4  # flags of a push
ABSENT = 8  # this worker has no gradient in this round
PARTIAL = 128  # behind the hyper-parameters comes the mask of segments
PLACED = 256  # rows are in the client's shared memory at `start`; behind the keys, their places
PLACE_NBYTES = 4  # uint32
HOLD, RELEASE, SKIP = 16, 32, 64  # keep the mean of the round; make it an update, or drop it
SQUARES: Final = struct.Struct("<d?")  # meta of the reply to HOLD: sum of squares, all finite
REJECTED: Final = struct.Struct("<Q")  # meta of the reply to a push of rows; then SQUARES, or why
ENCODED: Final = "encoded"  # dtype of a push whose body a codec wrote
MISSING: Final = ("init", "zero", "raise")  # of a sparse pull, by number

READ_BLOCK = 1  # option of a reply: its body is a block that may change, see _core.read_block
KNOWN_BLOCK = 2  # option of a reply: its meta has the place of the block; its body, the values
ENCODED_BODY = 16  # option of a reply: a codec wrote its body
WANT_COPY = 1  # option of a pull: send values, not where they are
WANT_EXACT = 16  # option of a pull: send values that are not compressed


PREPARE, COMMIT, FORGET = "prepare", "commit", "forget"  # the phases of a restore
LOOK = "look"  # before one: which checkpoint a server sees


class PullMeta(NamedTuple):
    """The meta of a pull of rows. The body has the keys, and perhaps `place`s as uint32.

    Attributes:
        n: keys.
        missing: index in MISSING: the result for a key without a row.
        n_out: rows in the memory that the server writes to; 0: the rows are the reply's body.
        place: of this memory in the client's shared memory. The body has the row of each key there;
            if it has none, the rows are in the order of the keys.
        held: number of the snapshot that is read; 0: the present values.
    """

    n: int
    missing: int
    n_out: int = 0
    place: int = 0
    held: int = 0

    def packed(self) -> bytes:
        return _PULL.pack(*self)

    @classmethod
    def of(cls, meta: bytes) -> PullMeta:
        if len(meta) != _PULL.size:
            raise RingcommError(f"ps: the meta of a pull has {len(meta)} bytes, not {_PULL.size}")
        return cls._make(_PULL.unpack(meta))


class KeyedPull(NamedTuple):
    """One of several pulls that a server gets in one request, each eight bytes per number.

    Attributes:
        table: number of the table.
        epoch: see Header.view.
        sequence: of the reply, unless the reply to all has its rows.
        clock: see Header.
        n: keys.
        n_out: see PullMeta.
        place: see PullMeta.
    """

    table: int
    epoch: int
    sequence: int
    clock: int
    n: int
    n_out: int
    place: int


class Answered(NamedTuple):
    """One pull's part of the meta in the reply to several pulls.

    Attributes:
        version: see HashTable; -1: a reply of its own follows.
        nbytes: of its rows in the body.
        option: see Header.
    """

    version: int
    nbytes: int = 0
    option: int = 0


def packed_numbers(rows: Sequence[KeyedPull] | Sequence[Answered]) -> NDArray[np.uint8]:
    return np.array(rows, "<i8").reshape(-1).view(np.uint8)


class PushMeta(NamedTuple):
    """The meta of a push.

    Attributes:
        weight: of this contribution to a mean; as a rule the number of samples.
        start: first element of the slice that is pushed; with PLACED, a place in memory.
        n: elements that are pushed, or rows.
        dtype: name of the gradient's, or ENCODED.
        flags: INITIAL (first values of a table), SPARSE (keys, then rows), ASSIGN, ABSENT,
            HOLD, RELEASE (weight is the factor of the mean), SKIP, PLACED.
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


def flags_of(meta: bytes) -> int:
    """Return the flags of a push; 0 if its meta is cut off."""
    return int.from_bytes(meta[24:26], "little")


def packed_owners(epoch: int, owners: Sequence[int]) -> bytes:
    return _EPOCH.pack(epoch) + np.array(owners, "<u2").tobytes()


def owners_of(meta: bytes) -> tuple[int, Owners]:
    owners = np.frombuffer(meta, "<u2", offset=_EPOCH.size).astype(np.uint32)
    return _EPOCH.unpack_from(meta)[0], owners


def packed_json(data: Any) -> bytes:
    return json.dumps(data, separators=(",", ":"), default=plain).encode()


def plain(number: Any) -> Any:
    if not isinstance(number, np.generic):
        raise TypeError(f"{number!r} cannot be sent: it is no number of Python or numpy")
    return number.item()


def packed_stamp(stamp: int) -> bytes:
    return _STAMP.pack(stamp)


def stamp_of(meta: bytes) -> int:
    stamp: int = _STAMP.unpack(meta)[0]
    return stamp
