"""The blocks of one dense table: the elements of each, and this worker's rounds of it."""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ringcomm.ps.placement.partitions import cuts
from ringcomm.ps.protocol.frame_meta import RELEASE
from ringcomm.ps.protocol.frames import INLINE_MAX

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.client.first_of import FirstOfRounds
    from ringcomm.ps.session import Session
    from ringcomm.ps.table_spec import Spec


class Blocks:
    """The blocks of a table that this rank has opened.

    Attributes:
        number: of the table.
        dtype: of its values.
        bounds: the first element of each block, and the end of the last.
        versions: updates that were in the block when this process pulled it last.
        rounds: the round that the next push is for, by block; see first_of.
        first_of: of ps.FirstOf(k): the rounds of this worker; None in other modes.
    """

    def __init__(self, session: Session, spec: Spec, created: dict[str, Any]) -> None:
        self.session, self.client, self.spec = session, session.client, spec
        self.number: int = created["number"]
        self.dtype = np.dtype(spec.dtype)
        self.bounds = cuts(spec.count, spec.block)
        self.versions = [0] * spec.partitions
        self.rounds = [session.begins.get(self.number, 0)] * spec.partitions
        self.first_of: FirstOfRounds | None = None
        self._lock = threading.Lock()  # of rounds
        epochs = {int(part): epoch for part, epoch in created["epochs"].items()}
        self.client.add_table(self.number, created["owners"], epochs)

    def bounds_of(self, part: int) -> tuple[int, int]:
        if not 0 <= part < self.spec.partitions:
            raise IndexError(
                f"table[{self.spec.name}]: no slice {part}; it has {self.spec.partitions}"
            )
        return self.bounds[part], self.bounds[part + 1]

    def pieces(self, start: int, stop: int, *, of_all: bool = False) -> list[tuple[int, int, int]]:
        """Return (block, first, last) of the blocks that a range of elements touches.

        Args:
            start: the first element.
            stop: the end of the last.
            of_all: also of those that it does not touch, with no elements.
        """
        pieces = []
        for part, (own, end) in enumerate(pairwise(self.bounds)):
            first, last = max(start, own), min(stop, end)
            if first < last or (start == stop == own == end):
                pieces.append((part, first, last))
            elif of_all:
                pieces.append((part, own, own))
        return pieces

    # --- memory ---------------------------------------------------------------------------------
    def memory_for(self, part: int, nbytes: int) -> Bytes:
        return self.session.memory_for(self.client.owner((self.number, part)), nbytes)

    def staged(self, part: int, piece: Bytes) -> Bytes:
        body, source = self.body_for(part, piece)
        if source is not None:
            body[:] = source
        return body

    def body_for(self, part: int, piece: Bytes) -> tuple[Bytes, Bytes | None]:
        """Return a body that the owner of a block reads, and what is to be copied to it yet.

        The latter is None if the body is a copy of the piece already: only one that travels as a
        message can be filled while others are on the wire.
        """
        if piece.nbytes <= INLINE_MAX:
            return piece.copy(), None  # what is sent now may have to be sent again
        memory = self.memory_for(part, piece.nbytes)
        if not self.client.shares_memory(self.client.owner((self.number, part))):
            return memory, piece
        memory[:] = piece
        return memory, None

    # --- rounds ---------------------------------------------------------------------------------
    def clock_of_push(self, part: int, flags: int, *, is_update: bool) -> int:
        """Return the round that a push is for; without rounds, the version it was computed of."""
        if not self.spec.mode.has_rounds:
            return self.versions[part]
        if self.first_of is not None:
            return self.first_of.last_of(self.number)
        with self._lock:
            number = self.rounds[part]
            self.rounds[part] += is_update
        return number - 1 if flags & RELEASE else number

    def clock_of_pull(self, part: int) -> int:
        """Return how much a block must have that this process pulls: rounds, or steps with SSP."""
        mode = self.spec.mode
        if mode.name == "ssp":
            return max(0, self.session.clock - mode.bound)
        if self.first_of is not None:
            return self.first_of.round_of(self.number)
        return self.rounds[part] if mode.has_rounds else 0

    def note_pulled(self, part: int, version: int, rounds: int) -> None:
        self.versions[part] = version
        if not self.spec.mode.has_rounds:
            return
        if self.first_of is not None:
            self.first_of.note_pulled(self.number, rounds)
            return
        with self._lock:  # after rounds that went by without this worker
            self.rounds[part] = max(self.rounds[part], rounds)
