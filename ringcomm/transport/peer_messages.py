"""The messages of send() and recv() between this rank and all others; see csrc/p2p."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringcomm._core import PeerMessages
from ringcomm.transport.tags import GROUPS

if TYPE_CHECKING:
    from ringcomm._core import Runner
    from ringcomm.transport.base import Transport

_PIPES, _FIRST_LONG = 1, 2  # streams; those that make a group have stream 0


def make_peer_messages(transport: Transport, runner: Runner, *, may_read: bool) -> PeerMessages:
    """Return the messages of this rank. Those of ranks that share no memory go through `runner`.

    may_read: this rank reads long ones in the private memory of their senders, where the system
        allows it.
    """
    node, tags = transport.node, transport.tags
    memories = {} if node is None else node.memories
    others = [rank for rank in range(transport.size) if rank not in memories]
    if node is None:
        others.remove(transport.rank)
    numbers = transport.wire_ranks(others)
    pipe, first, second = (tags.tag(0, _PIPES + i, GROUPS) for i in range(3))
    return PeerMessages(
        transport.rank,
        memories,
        node is not None and node.is_crowded,
        may_read,
        runner,
        dict(zip(others, numbers, strict=True)),
        (pipe, first, second - first, tags.n_streams - _FIRST_LONG),
    )
