"""The order in which the operations of a team are enqueued, the same on all ranks.

The first rank gives each operation its place, once all ranks have agreed on the operation.
"""

from __future__ import annotations

import numpy as np

from ringcomm.arrays import DTYPES, Flat
from ringcomm.collectives.algorithms import tree
from ringcomm.engine.core.agreement import gather_alike
from ringcomm.transport.channel import Channel, Until, Wait

PLACE_NBYTES = 8


class LaunchOrder:
    """The places of the operations of one team, on one rank."""

    def __init__(self) -> None:
        self._n_ordered = 0  # on the first rank: the number of operations that have a place
        self._turn = 0  # the place of the operation that may launch

    async def place(self, t: Channel) -> int:
        """Return the place of an operation; collective."""
        number = np.array([self._next(t)], np.int64)
        await tree.broadcast_(Flat(number.view(np.uint8), DTYPES["int64"]), 0, t)
        return int(number[0])

    async def place_and_bytes(self, t: Channel, mine: bytes) -> tuple[int, list[bytes]]:
        """Return the place, and the bytes of every rank, in one round.

        Args:
            t: the operation's channel.
            mine: this rank's bytes, equally many on all ranks; PLACE_NBYTES others follow them.
        """
        of_all = await gather_alike(mine + self._next(t).to_bytes(PLACE_NBYTES, "little"), t)
        place = int.from_bytes(of_all[0][-PLACE_NBYTES:], "little")
        return place, of_all

    def _next(self, t: Channel) -> int:
        """Return the next place on the first rank, 0 on the others."""
        if t.rank:
            return 0
        self._n_ordered += 1
        return self._n_ordered - 1

    async def take_turn(self, place: int) -> None:
        """Wait until the operations before this place have ended their turns."""
        if self._turn != place:
            await Wait((Until(lambda: self._turn == place),))

    def end_turn(self) -> None:
        """Let the next operation have its turn."""
        self._turn += 1
