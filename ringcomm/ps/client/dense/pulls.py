"""Pulls from one dense table: reads shared memory, or requests values from servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ringcomm import _core, codec
from ringcomm.ps.client.request import Request
from ringcomm.ps.protocol.frame_meta import (
    ENCODED_BODY,
    KNOWN_BLOCK,
    PLACE,
    READ_BLOCK,
    WANT_COPY,
    WANT_EXACT,
    stamp_of,
)
from ringcomm.ps.protocol.frames import FrameKind

if TYPE_CHECKING:
    from ringcomm._core import NodeMemory
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.client.dense.blocks import Blocks
    from ringcomm.ps.client.future import Future
    from ringcomm.ps.protocol.link import Delivery

Array = NDArray[Any]


class DensePulls:
    """Fetches the values of one table.

    Attributes:
        known: blocks in memory that this node maps: epoch, memory of the server, and the block.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._blocks, self._client, self._spec = blocks, blocks.client, blocks.spec
        self._has_values = self._spec.initial != "chief"
        self.known: dict[int, tuple[int, NodeMemory, Bytes]] = {}

    def pull(self, out: Array, start: int, stop: int, *, exact: bool) -> Future[Array]:
        flat = out.reshape(-1)
        may_read = exact or not self._spec.compression.get("pull")
        requests = []
        for part, first, last in self._blocks.pieces(start, stop):
            target = flat[first - start : last - start]
            if not (may_read and self._read(part, first, target)):
                requests.append(self._request(part, first, target, WANT_EXACT if exact else 0))
        return self._client.call(f"pull[{self._spec.name}]", requests, lambda: out)

    def wait_for_values(self) -> None:
        """Return once the first values of the table are there, which the chief sends."""
        if self._has_values:
            return
        requests = []
        for part, first in enumerate(self._blocks.bounds[:-1]):
            n = min(1, self._blocks.bounds[part + 1] - first)
            request = self._request(part, first, np.empty(n, self._blocks.dtype), 0)
            request.clock = 0  # whatever the rounds
            requests.append(request)
        self._client.call(f"table[{self._spec.name}]", requests, lambda: None).wait()
        self._has_values = True

    def _read(self, part: int, first: int, target: Array) -> bool:
        """Read values in place; return False if the server must be asked.

        Only if no request of this rank is under way: then its pushes are in the values.
        """
        known = self.known.get(part)
        blocks, client = self._blocks, self._client
        if known is None or blocks.session.snapshot:
            return False
        (epoch, server, memory), partition = known, (blocks.number, part)
        if client.idle_epoch(partition) != epoch:
            return False
        offset = (first - blocks.bounds[part]) * blocks.dtype.itemsize
        clock = _core.read_open_block(
            server, memory, target.view(np.uint8), offset, blocks.clock_of_pull(part)
        )
        # It may have moved meanwhile, and its memory may be used for something else.
        if clock < 0 or client.idle_epoch(partition) != epoch:
            return False
        blocks.note_pulled(part, clock, clock)
        client.listen()
        return True

    def _request(self, part: int, first: int, target: Array, option: int) -> Request:
        """Return the request that fills `target` with elements of a block, from `first` on."""
        blocks = self._blocks
        begin, end = blocks.bounds[part], blocks.bounds[part + 1]
        start, stop = first - begin, first - begin + len(target)
        is_whole = len(target) == end - begin
        data, itemsize = target.view(np.uint8), blocks.dtype.itemsize

        def take(reply: Delivery) -> Request | None:
            version, body, kind = reply.header.clock, reply.body, reply.header.option
            if kind & ENCODED_BODY:
                if is_whole:
                    codec.decode(body, target)
                else:
                    data[:] = codec.decoded(body)[start:stop].view(np.uint8)
            elif kind & READ_BLOCK:
                stamp = _core.read_block(body, data, start * itemsize)
                version += stamp - stamp_of(reply.meta)  # updates since the reply was written
                if stamp < 0:  # updates come faster than it can be read
                    return self._request(part, first, target, option | WANT_COPY)
            elif body is not data:
                data[:] = body[start * itemsize : stop * itemsize]
            if kind & (READ_BLOCK | KNOWN_BLOCK):
                self._note_place(part, reply)
            blocks.note_pulled(part, version, reply.header.clock)
            return None

        return Request(
            FrameKind.PULL,
            (blocks.number, part),
            clock=blocks.clock_of_pull(part),
            option=option,
            place=blocks.session.snapshot,
            out=data if is_whole and not self._spec.compression.get("pull") else None,
            on_reply=take,
        )

    def _note_place(self, part: int, reply: Delivery) -> None:
        """Keep where a block is."""
        if self._spec.mode.name == "ssp":
            return  # only the server knows which steps others have completed
        link = self._client.link
        if reply.header.option & READ_BLOCK:
            memory = reply.body
        else:
            memory = link.view(reply.source, *PLACE.unpack(reply.meta))
        node = self._blocks.session.engine.transport.node
        assert node is not None
        self.known[part] = reply.header.view, node.memory_of(reply.source), memory
