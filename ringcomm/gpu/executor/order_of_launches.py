"""The order in which the operations of a team are enqueued, the same on all ranks.

The first rank gives each operation its place, once all ranks have agreed on the operation.
"""

from __future__ import annotations

import numpy as np

from ringcomm._core import Places
from ringcomm.arrays import DTYPES, Flat
from ringcomm.collectives.algorithms import tree
from ringcomm.engine.core.agreement import gather_alike
from ringcomm.transport.channel import Channel, Until, Wait

_PLACE_NBYTES = 8


class LaunchOrder:
    """The places of the operations of one team, on one rank."""

    def __init__(self) -> None:
        self._places = Places()  # on the first rank: those that it has given
        self._turn = 0  # the place of the operation that may launch

    async def place(self, t: Channel) -> int:
        """Return the place of an operation; collective."""
        number = np.array([self._next(t)], np.int64)
        await tree.broadcast_(Flat(number.view(np.uint8), DTYPES["int64"]), 0, t)
        return int(number[0])

    async def place_and_bytes(self, t: Channel, mine: bytes) -> tuple[int, list[bytes]]:
        """Return the place, and the bytes of every rank, in one round.

        In shared memory that is also the round in which the ranks agree on the operation, if they
        have not yet: a place is given only to what all ranks have agreed on.

        Args:
            t: the operation's channel.
            mine: this rank's bytes, equally many on all ranks.

        Raises:
            Disagreement: see Channel.meet().
        """
        if t.meeting is not None:
            return await self._place_and_bytes_in_node(t, mine)
        place = self._next(t).to_bytes(_PLACE_NBYTES, "little")
        of_all = await gather_alike(place + mine, t)
        return int.from_bytes(of_all[0][:_PLACE_NBYTES], "little"), [
            each[_PLACE_NBYTES:] for each in of_all
        ]

    async def _place_and_bytes_in_node(self, t: Channel, mine: bytes) -> tuple[int, list[bytes]]:
        n = len(mine)
        of_all = np.empty((t.size, n), np.uint8)
        of_all[t.rank] = np.frombuffer(mine, np.uint8)
        pulls = [(rank, 0, of_all[rank]) for rank in range(t.size) if rank != t.rank]
        place = await t.place_and_bytes(self._places, of_all[t.rank], pulls)
        whole = of_all.tobytes()
        return place, [whole[rank * n : (rank + 1) * n] for rank in range(t.size)]

    def _next(self, t: Channel) -> int:
        return 0 if t.rank else self._places.take()

    async def take_turn(self, place: int) -> None:
        if self._turn != place:
            await Wait((Until(lambda: self._turn == place),))

    def end_turn(self) -> None:
        self._turn += 1
