"""Ranks as threads of one process: nearly every test needs no mpirun.

Stricter than MPI may be: a send completes only when its receive has been matched, so code that
changes a buffer too early, or that relies on MPI buffering small messages, fails here at once. What
moves the messages is C++ (csrc/wire/loopback.hpp), so that ranks with and without Python meet.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import Any

from ringcomm import _core
from ringcomm._core import NodeMemory, PeerMessages
from ringcomm.arrays.base import Bytes
from ringcomm.transport.base import ArrivedMessage, Event, PeerDied, WireRequest
from ringcomm.transport.membership.view import View
from ringcomm.transport.node.shared_memory import SharedNode
from ringcomm.transport.peer_messages import make_peer_messages
from ringcomm.transport.tags import WIDEST
from ringcomm.transport.unannounced_messages import ShortMessage, ShortMessages, require_fit

_ARENA = 5 << 30


class LoopbackHub:
    """The room in which `size` ranks meet; hand `hub.transport(rank)` to each thread.

    Args:
        size: number of ranks.
        nodes: of each rank: the lowest rank of its node; by default each has one of its own.
            Ranks of one node share memory, too.
        is_native: recorded algorithms run without Python.
    """

    def __init__(
        self, size: int, nodes: tuple[int, ...] | None = None, *, is_native: bool = True
    ) -> None:
        self.size = size
        self.nodes = tuple(range(size)) if nodes is None else nodes
        self.is_native = is_native
        self.messages = _core.LoopbackHub(size)
        self.grave: list[WireRequest] = []  # given up, and peers may still touch the buffers
        self._lock = threading.Lock()
        self._events: list[deque[Event]] = [deque() for _ in range(size)]
        self._dead: set[int] = set()
        self.short_messages: list[deque[ShortMessage]] = [deque() for _ in range(size)]
        self._memories = {
            rank: NodeMemory.create(rank, _ARENA)
            for rank, node in enumerate(self.nodes)
            if self.nodes.count(node) > 1
        }

    def transport(self, rank: int) -> LoopbackTransport:
        """Return the wire of `rank`."""
        return LoopbackTransport(self, rank, self._node_of(rank))

    def _node_of(self, rank: int) -> SharedNode | None:
        """Return what this rank shares, mapped anew, as other processes would."""
        if rank not in self._memories:
            return None
        mates = [r for r, node in enumerate(self.nodes) if node == self.nodes[rank]]
        node = SharedNode(self._memories[rank], rank, len(mates))
        for mate in mates:
            if mate != rank:
                m = self._memories[mate]
                node.adopt(mate, NodeMemory.open(os.getpid(), m.board_fd, m.arena_fd, mate))
        return node

    def kill(self, rank: int, reason: str = "was killed", *, blames: int | None = None) -> None:
        """Make `rank` dead for all others from now on."""
        with self._lock:
            if rank in self._dead:
                return
            self._dead.add(rank)
        death = PeerDied(rank, reason, rank if blames is None else blames)
        for other in range(self.size):
            if other != rank:
                self.post_event(other, death)

    def post_event(self, dest: int, event: Event) -> None:
        """Put an event into the mailbox of `dest`."""
        self._events[dest].append(event)
        self.messages.ring(dest)

    def take_events(self, rank: int) -> list[Event]:
        """Empty the mailbox of `rank`."""
        with self._lock:
            events = self._events[rank]
            return [events.popleft() for _ in range(len(events))]


class LoopbackTransport:
    """Transport of one rank of a LoopbackHub."""

    is_threaded = True
    implementation = "threads"
    tags = WIDEST
    ring_epoch = 0

    def __init__(self, hub: LoopbackHub, rank: int, node: SharedNode | None) -> None:
        self.rank = rank
        self.size = hub.size
        self.nodes = hub.nodes
        self.view = View.first(hub.size)
        self.node = node
        self.loop = _core.Loop(None if node is None else node.memory, is_crowded=True)
        self._runner = hub.messages.runner(rank)
        self.runner = self._runner if hub.is_native else None
        self._messages: PeerMessages | None = None
        self._hub = hub

    def isend(self, data: Bytes, dest: int, tag: int) -> WireRequest:
        """Start to send; complete when matched."""
        message = self._hub.messages.send(self.rank, data, dest, self._checked(tag))
        message.start()
        return message

    def irecv(self, out: Bytes, source: int, tag: int) -> WireRequest:
        """Start to receive."""
        message = self._hub.messages.receive(self.rank, out, source, self._checked(tag))
        message.start()
        return message

    def _checked(self, tag: int) -> int:
        if not 0 <= tag <= self.tags.largest_tag:  # as MPI does
            raise ValueError(f"tag {tag}: there are tags up to {self.tags.largest_tag}")
        return tag

    def messages(self, *, may_read: bool) -> PeerMessages:
        """Return the messages of send() and recv()."""
        if self._messages is None:
            self._messages = make_peer_messages(self, self._runner, may_read=may_read)
        return self._messages

    def wire_ranks(self, ranks: list[int]) -> list[int]:
        """Return the ranks: their numbers never change."""
        return ranks

    def ranks_of(self, comm: Any) -> tuple[int, ...]:
        """Refuse: there is no MPI."""
        raise ValueError(f"{comm!r}: ranks that are threads have no communicators")

    def control(self, dest: int, message: bytes) -> None:
        """Put the message into the other's mailbox."""
        self._hub.post_event(dest, ArrivedMessage(self.rank, message))

    def short_messages(self) -> ShortMessages:
        """Return the messages of this rank."""
        return LoopbackMessages(self._hub.short_messages, self.rank, self._hub.messages.ring)

    def poll(self) -> list[Event]:
        """Return and forget what is in the mailbox."""
        return self._hub.take_events(self.rank)

    def park(self, seconds: float) -> None:
        """Sleep until there is news for this rank."""
        self._hub.messages.sleep(self.rank, seconds)

    def wake(self) -> None:
        """End the park() of this rank."""
        self._hub.messages.ring(self.rank)

    def abandon(self, requests: list[WireRequest]) -> None:
        """Withdraw receives; sends may be matched all the same."""
        for request in requests:
            request.cancel()
        self._hub.grave.extend(requests)

    def label(self, rank: int) -> str:
        """Return "rank 3"."""
        return f"rank {rank}"

    def close(self, *, is_clean: bool) -> None:
        """A rank that does not leave in order is dead to the others."""
        self.loop.stop()
        if self._messages is not None:
            self._messages.close_wires(0.0)
        self._runner.close()
        if not is_clean:
            self._hub.kill(self.rank, "closed its transport")


class LoopbackMessages:
    """Short messages between ranks that are threads: a queue per rank.

    Args:
        boxes: of all ranks, by rank; shared by them.
        rank: this one.
        ring: wakes a rank.
    """

    def __init__(self, boxes: list[deque[ShortMessage]], rank: int, ring: Any) -> None:
        self._boxes = boxes
        self._rank = rank
        self._ring = ring

    n_unsent = 0

    def send(self, dest: int, data: bytes) -> None:
        """Put a message into another's queue."""
        require_fit(data, dest)
        self._boxes[dest].append(ShortMessage(self._rank, bytes(data)))
        self._ring(dest)

    def collect(self) -> list[ShortMessage]:
        """Empty this rank's queue."""
        box, messages = self._boxes[self._rank], []
        while box:
            messages.append(box.popleft())
        return messages

    def close(self) -> None:
        """Do nothing: nobody waits."""
