"""Pipes in shared memory that carry frames between the ranks of a node; csrc/ps/postbox.hpp."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from ringcomm import _core
from ringcomm.ps.link import INLINE_MAX, META_MAX
from ringcomm.transport.mail import LETTER_MAX

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.transport.base import Transport

PIPE_NBYTES: Final = 8 * LETTER_MAX  # a few large letters, or a thousand small ones


class Pipes:
    """The ends of pipes at which this rank reads, before their writers know of them.

    Args:
        transport: of this rank.
        mates: ranks that it may exchange frames with, itself too.
    """

    def __init__(self, transport: Transport, mates: Iterable[int]) -> None:
        self._transport = transport
        self._memory: dict[int, Bytes] = {}
        node = transport.node
        if node is None:
            return
        for mate in mates:
            if transport.nodes[mate] == transport.nodes[transport.rank]:
                self._memory[mate] = node.empty(PIPE_NBYTES)
        for place in self.places.values():
            _core.clear_pipe(node.memory, place, PIPE_NBYTES)

    @property
    def places(self) -> dict[int, int]:
        """Where in this rank's memory each mate is to write; for all ranks to know."""
        node = self._transport.node
        if node is None:
            return {}
        return {mate: node.offset_of(x) for mate, x in self._memory.items()}

    def connect(
        self, places: list[dict[int, int]], *, goes_on_alone: bool, looks: int
    ) -> Post | None:
        """Return what sends and receives; None where no rank shares memory with this one.

        Args:
            places: of every rank of the job.
            goes_on_alone: frames are looked after also while this rank's program computes.
            looks: how often to look for one, in vain, before going to sleep; each takes 40 ns.
        """
        transport, node = self._transport, self._transport.node
        if node is None:
            return None
        me, own = transport.rank, self.places
        mates = [
            (mate, node.memory_of(mate), place, places[mate][me])
            for mate, place in own.items()
            if me in places[mate]
        ]
        if not mates:
            return None
        box = _core.make_postbox(
            me,
            node.memory,
            PIPE_NBYTES,
            mates,
            goes_on_alone,
            looks,
            node.is_crowded,
            INLINE_MAX,
            META_MAX,
        )
        transport.loop.add(box)
        return Post(box, self)


class Post:
    """A postbox, and the memory that its pipes lie in.

    Args:
        box: see csrc/ps/postbox.hpp.
        pipes: stay alive as long as this does.
    """

    def __init__(self, box: _core.PostBox, pipes: Pipes) -> None:
        self.box = box
        self._pipes = pipes
