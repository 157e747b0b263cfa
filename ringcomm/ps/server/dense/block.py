"""A block of a dense table on its server: Python's wrapper of the block in C++."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringcomm import _core
from ringcomm.arrays.base import Bytes
from ringcomm.arrays.dtypes import DTYPES
from ringcomm.ps.optim import Updater

Array = NDArray[Any]


@dataclass
class BlockTraffic:
    """Counts of what a partition has done.

    Attributes:
        pushes: that were applied, or waited for their round.
        pulls: that were answered.
        nbytes: of both.
        calls: of functions.
        late: pushes whose round was over.
        apply_s: time spent on updates and functions.
        staleness: of async pushes: how many had missed so many updates.
    """

    pushes: int = 0
    pulls: int = 0
    nbytes: int = 0
    calls: int = 0
    late: int = 0
    apply_s: float = 0.0
    staleness: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of_json(cls, content: dict[str, Any]) -> BlockTraffic:
        """Return what asdict() was, before JSON made texts of keys."""
        staleness = {int(missed): n for missed, n in content["staleness"].items()}
        return cls(**{**content, "staleness": staleness})


class Block:
    """Values, the state of their updater, and whose pushes are in them.

    Two flags say what needs no Python: pushes are carried out and acknowledged by C++ as long as it
    `may_ack`, and ranks that map the values read them as long as they `may_read`.

    Args:
        count: elements.
        dtype: of the values.
        updater: makes updates.
        memory: returns memory for the values, which clients on this node map.

    Attributes:
        count, dtype, updater: see above.
        memory: of the values.
        counts: what Python has done, see also traffic.
    """

    def __init__(
        self,
        count: int,
        dtype: np.dtype[Any],
        updater: Updater,
        memory: Callable[[int], Bytes],
    ) -> None:
        self.count, self.dtype, self.updater = count, dtype, updater
        self.memory = memory(_core.block_nbytes(count * dtype.itemsize))
        self._block = _core.DenseBlock(self.memory, count, DTYPES[dtype.name].kernel, 0)
        self._slots: list[Array] = []
        self.slots = updater.new_slots((count,), dtype)
        self.counts = BlockTraffic()
        self._is_ready = self._may_ack = self._may_read = False

    @property
    def version(self) -> int:
        """Updates so far, or rounds, some of which may have changed nothing."""
        return self._block.clock

    @version.setter
    def version(self, version: int) -> None:
        self._block.clock = version

    @property
    def steps(self) -> int:
        """Updates that the updater has made."""
        return self._block.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._block.steps = steps

    @property
    def slots(self) -> list[Array]:
        return self._slots

    @slots.setter
    def slots(self, slots: list[Array]) -> None:
        self._block.attach(self.updater.code, self.updater.hyper, slots)
        self._slots = slots

    @property
    def is_ready(self) -> bool:
        return self._is_ready

    @is_ready.setter
    def is_ready(self, is_ready: bool) -> None:
        self._is_ready = is_ready
        self._block.may_ack = is_ready and self._may_ack
        self._block.may_read = is_ready and self._may_read

    @property
    def may_ack(self) -> bool:
        return self._may_ack

    @may_ack.setter
    def may_ack(self, may_ack: bool) -> None:
        self._may_ack = may_ack
        self._block.may_ack = may_ack and self._is_ready

    @property
    def may_read(self) -> bool:
        """Ranks may read the values where they stand, once there are any."""
        return self._may_read

    @may_read.setter
    def may_read(self, may_read: bool) -> None:
        self._may_read = may_read
        self._block.may_read = may_read and self._is_ready

    @property
    def block_updater(self) -> _core.BlockUpdater:
        return self._block.block_updater

    def last_of(self, rank: int) -> int:
        return self._block.last(rank)

    def note_last(self, rank: int, sequence: int) -> None:
        if sequence == 0:
            self._block.forget(rank)
        else:
            self._block.note_last(rank, sequence)

    def all_last(self) -> dict[int, int]:
        return self._block.applied()

    def merge_applied(self, applied: Iterable[Sequence[int]]) -> None:
        """Take note of whose pushes are in it: ranks, and the numbers of their last ones."""
        for rank, sequence in applied:
            self.note_last(rank, max(self.last_of(rank), sequence))

    @property
    def traffic(self) -> BlockTraffic:
        pushes, nbytes, pulls, seconds, staleness = self._block.take_traffic()
        counts = self.counts
        counts.pushes += pushes
        counts.pulls += pulls
        counts.nbytes += nbytes + pulls * self.count * self.dtype.itemsize
        counts.apply_s += seconds
        for missed, n in staleness.items():
            counts.staleness[missed] = counts.staleness.get(missed, 0) + n
        return counts

    @property
    def stamp(self) -> int:
        """Changes whenever values or slots do."""
        return self._block.version

    @property
    def values(self) -> Array:
        """The values where they stand, until the next update but one."""
        nbytes = self.count * self.dtype.itemsize
        return self.memory[self._block.offset :][:nbytes].view(self.dtype)
