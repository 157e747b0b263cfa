"""Ranks as threads of one process: nearly every test needs no mpirun.

Stricter than MPI may be: a send completes only when its receive has been matched, so code that
changes a buffer too early, or that relies on MPI buffering small messages, fails here at once.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ringcomm._core import NodeMemory
from ringcomm.arrays.base import Bytes
from ringcomm.transport.base import ANY_SOURCE, Arrived, Died, Event, Request, WireFault
from ringcomm.transport.shm import RegionAddress, SharedNode

_ARENA = 1 << 32


@dataclass(eq=False)
class _Message:
    hub: LoopbackHub
    buffer: Bytes
    peer: int  # destination of a send, source of a receive
    tag: int
    source: int = ANY_SOURCE  # filled in when a receive is matched
    is_done: bool = False
    is_cancelled: bool = False
    fault: str = ""

    def test(self) -> bool:
        if self.fault:
            raise WireFault(self.fault)
        return self.is_done

    def cancel(self) -> None:
        self.hub.cancel(self)


@dataclass(eq=False)
class _Persistent:
    post: Callable[[Bytes, int, int], _Message]
    buffer: Bytes
    peer: int
    tag: int
    _current: _Message | None = None

    def start(self) -> None:
        if self._current is not None and not self._current.is_done:
            raise WireFault("started again before its last round was complete")
        self._current = self.post(self.buffer, self.peer, self.tag)

    def test(self) -> bool:
        return self._current is None or self._current.test()

    def cancel(self) -> None:
        if self._current is not None:
            self._current.cancel()

    @property
    def source(self) -> int:
        return ANY_SOURCE if self._current is None else self._current.source


@dataclass
class _Mailbox:
    sends: deque[_Message] = field(default_factory=deque)
    receives: deque[_Message] = field(default_factory=deque)
    events: deque[Event] = field(default_factory=deque)


class LoopbackHub:
    """The room in which `size` ranks meet; hand `hub.transport(rank)` to each thread.

    Args:
        size: number of ranks.
        nodes: of each rank: the lowest rank of its node; by default each has one of its own.
            Ranks of one node share memory, too.
    """

    def __init__(self, size: int, nodes: tuple[int, ...] | None = None) -> None:
        self.size = size
        self.nodes = tuple(range(size)) if nodes is None else nodes
        self._memories = {
            rank: NodeMemory.create(rank, _ARENA)
            for rank, node in enumerate(self.nodes)
            if self.nodes.count(node) > 1
        }
        self._news = threading.Condition()
        self._boxes = [_Mailbox() for _ in range(size)]
        self._dead: set[int] = set()

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
                node.meet(mate, RegionAddress(os.getpid(), m.board_fd, m.arena_fd, mate))
        return node

    def kill(self, rank: int, reason: str = "was killed", *, blames: int | None = None) -> None:
        """Let `rank` be dead for all others from now on."""
        with self._news:
            if rank in self._dead:
                return
            self._dead.add(rank)
            for other, box in enumerate(self._boxes):
                if other != rank:
                    box.events.append(Died(rank, reason, rank if blames is None else blames))
            self._news.notify_all()

    def post_send(self, source: int, data: Bytes, dest: int, tag: int) -> _Message:
        """Post a send from `source`; matched at once if its receive is there."""
        message = _Message(self, data, dest, tag, source)
        with self._news:
            box = self._boxes[dest]
            for receive in box.receives:
                if receive.tag == tag and receive.peer in (source, ANY_SOURCE):
                    box.receives.remove(receive)
                    self._deliver(message, receive)
                    return message
            box.sends.append(message)
        return message

    def post_receive(self, dest: int, out: Bytes, source: int, tag: int) -> _Message:
        """Post a receive at `dest`; matched with the oldest send that fits."""
        receive = _Message(self, out, source, tag)
        with self._news:
            box = self._boxes[dest]
            for message in box.sends:
                if message.tag == tag and source in (message.source, ANY_SOURCE):
                    box.sends.remove(message)
                    self._deliver(message, receive)
                    return receive
            box.receives.append(receive)
        return receive

    def post_event(self, dest: int, event: Event) -> None:
        """Put an event into the mailbox of `dest`."""
        with self._news:
            self._boxes[dest].events.append(event)
            self._news.notify_all()

    def take_events(self, rank: int) -> list[Event]:
        """Empty the mailbox of `rank`."""
        with self._news:
            events = list(self._boxes[rank].events)
            self._boxes[rank].events.clear()
        return events

    def cancel(self, receive: _Message) -> None:
        """Withdraw an unmatched receive."""
        with self._news:
            for box in self._boxes:
                if receive in box.receives:
                    box.receives.remove(receive)
                    receive.is_cancelled = True

    def wait_for_news(self, seconds: float) -> None:
        """Sleep until something is delivered anywhere, at most `seconds`."""
        with self._news:
            self._news.wait(seconds)

    def announce(self) -> None:
        """Let all who wait for news look again."""
        with self._news:
            self._news.notify_all()

    def _deliver(self, message: _Message, receive: _Message) -> None:
        if message.buffer.nbytes != receive.buffer.nbytes:
            message.fault = receive.fault = (
                f"{message.buffer.nbytes} bytes sent, {receive.buffer.nbytes} expected"
            )
        else:
            np.copyto(receive.buffer, message.buffer)
            receive.source = message.source
        message.is_done = receive.is_done = True
        self._news.notify_all()


class LoopbackTransport:
    """Transport of one rank of a LoopbackHub."""

    is_threaded = True
    descriptor = -1
    ring_epoch = 0
    incarnation = 0
    library = "threads"

    def __init__(self, hub: LoopbackHub, rank: int, node: SharedNode | None) -> None:
        self.rank = rank
        self.size = hub.size
        self.nodes = hub.nodes
        self.node = node
        self._hub = hub
        self._is_woken = False

    def isend(self, data: Bytes, dest: int, tag: int) -> Request:
        """Start to send; complete when matched."""
        return self._post_send(data, dest, tag)

    def irecv(self, out: Bytes, source: int, tag: int) -> Request:
        """Start to receive."""
        return self._post_receive(out, source, tag)

    def send_init(self, data: Bytes, dest: int, tag: int) -> _Persistent:
        """Return a send that can be started many times."""
        return _Persistent(self._post_send, data, dest, tag)

    def recv_init(self, out: Bytes, source: int, tag: int) -> _Persistent:
        """Return a receive that can be started many times."""
        return _Persistent(self._post_receive, out, source, tag)

    def control(self, dest: int, message: bytes) -> None:
        """Put the message into the other's mailbox."""
        self._hub.post_event(dest, Arrived(self.rank, message))

    def poll(self) -> list[Event]:
        """Return and forget what is in the mailbox."""
        return self._hub.take_events(self.rank)

    def park(self, seconds: float) -> None:
        """Sleep until there is news."""
        if not self._is_woken:
            self._hub.wait_for_news(seconds)
        self._is_woken = False

    def wake(self) -> None:
        """Let park() return."""
        self._is_woken = True
        self._hub.announce()

    def abandon(self, requests: list[Request]) -> None:
        """Withdraw receives; Python keeps the buffers of sends alive."""
        for request in requests:
            request.cancel()

    def label(self, rank: int) -> str:
        """Return "rank 3"."""
        return f"rank {rank}"

    def close(self, *, is_clean: bool) -> None:
        """A rank that does not leave in order is dead to the others."""
        if self.node is not None:
            self.node.close()
        if not is_clean:
            self._hub.kill(self.rank, "closed its transport")

    def _post_send(self, data: Bytes, dest: int, tag: int) -> _Message:
        return self._hub.post_send(self.rank, data, dest, tag)

    def _post_receive(self, out: Bytes, source: int, tag: int) -> _Message:
        return self._hub.post_receive(self.rank, out, source, tag)
