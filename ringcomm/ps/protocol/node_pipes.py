"""Pipes in shared memory that carry frames between ranks of a node: csrc/ps/pipe_endpoint.hpp."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from ringcomm import _core
from ringcomm.ps.protocol.frames import INLINE_MAX, META_MAX
from ringcomm.transport.unannounced_messages import SHORT_MESSAGE_MAX

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.transport.base import Transport

PIPE_NBYTES: Final = 8 * SHORT_MESSAGE_MAX  # a few large frames, or a thousand small ones


class Pipes:
    """The pipes in which this rank gets frames, and its endpoint, which reads and writes pipes.

    Args:
        transport: of this rank.
        mates: ranks that it may exchange frames with, itself too.

    Attributes:
        endpoint: sends and receives; None before connect(), and if no rank shares memory with
            this one.
    """

    endpoint: _core.PipeEndpoint | None = None

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
        """Place in this rank's memory to which each mate writes; all ranks must know it."""
        node = self._transport.node
        if node is None:
            return {}
        return {mate: node.offset_of(x) for mate, x in self._memory.items()}

    def connect(self, places: list[dict[int, int]], *, goes_on_alone: bool, looks: int) -> None:
        """Make the endpoint.

        Args:
            places: of every rank of the job.
            goes_on_alone: look for frames also while this rank's program computes.
            looks: how often to look for one, in vain, before going to sleep; each takes 40 ns.
        """
        transport, node, me = self._transport, self._transport.node, self._transport.rank
        if node is None:
            return
        mates = [
            (mate, node.memory_of(mate), place, places[mate][me])
            for mate, place in self.places.items()
            if me in places[mate]
        ]
        if not mates:
            return
        self.endpoint = _core.make_pipe_endpoint(
            me, node.memory, PIPE_NBYTES, mates, goes_on_alone, looks, node.is_crowded,
            INLINE_MAX, META_MAX,
        )  # fmt: skip
        transport.loop.add(self.endpoint)
