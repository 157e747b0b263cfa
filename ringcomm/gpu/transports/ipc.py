"""The transport over CUDA IPC: one kernel reads from the memory of all ranks, and writes to it.

ipc_commands.py says what a rank's stream does; this carries it out. Streams wait for each other by
numbers in host memory that all ranks map: a stream writes its rank's, and waits for the others'. No
kernel ever spins, so whoever writes those numbers frees what is stuck (release()), and who is late
stands there for everyone to see.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ringcomm.arrays.base import Bytes, Span
from ringcomm.gpu.device.base import Device, KernelReduction
from ringcomm.gpu.device.host_pool import PAGE_NBYTES, HostPool
from ringcomm.gpu.device.memory import NOWHERE, Address
from ringcomm.gpu.device.regions import Neighbour
from ringcomm.gpu.transports import ipc_commands
from ringcomm.gpu.transports.base import Reduce, Update, Work
from ringcomm.gpu.transports.ipc_commands import (
    Copy,
    Outline,
    View,
    is_written_by_others,
    others_of,
)

LINE = 128  # bytes between the numbers of two ranks: no two share a cache line
STAGING_NBYTES = 64 << 20
_GRAIN = 256
_FAR = 1 << 30  # ahead of any number that a stream may be waiting for


def flags_nbytes(size: int) -> int:
    """Return how much host memory `size` ranks meet in: whole pages, to be registered."""
    return -(-size * LINE // PAGE_NBYTES) * PAGE_NBYTES


class IpcTransport:
    """GpuTransport of ranks that map each other's GPU memory.

    Args:
        device: this rank's.
        rank: of this rank in the team.
        size: number of ranks.
        flags: host memory that all of them map, zeroed; see flags_nbytes().
        host: registers it.
    """

    name = "ipc"

    def __init__(
        self, device: Device, rank: int, size: int, *, flags: Bytes, host: HostPool
    ) -> None:
        self._device = device
        self._rank = rank
        self._size = size
        self._regions = device.regions
        self._numbers = flags.view(np.uint32)[:: LINE // 4][:size]
        self._shared, self._host = flags, host
        start = host.register(flags)
        self._flags = [start + LINE * r for r in range(size)]
        self._neighbours = [Neighbour(device) for _ in range(size)]
        self._phase = 0
        share = max(_GRAIN, STAGING_NBYTES // size // _GRAIN * _GRAIN)
        self._capacity = share * size
        self._staging: Span | None = None
        self._scratch: Span | None = None
        self.stream = device.new_stream()
        self.meets_on_stream = device.has_stream_values

    def try_out(self, addresses: Sequence[Address]) -> None:
        """Map memory of each rank: what may be exported may still not be mapped, in containers.

        Args:
            addresses: by rank; NOWHERE: that rank has a problem of its own.
        """
        for neighbour, address in others_of(
            list(zip(self._neighbours, addresses, strict=True)), self._rank
        ):
            if address != NOWHERE:
                neighbour.find(address)

    def meet(self) -> None:
        """Make the stream write this rank's number, and wait for the others'."""
        self._phase = (self._phase + 1) % (1 << 32)
        self._device.write_value(self.stream, self._flags[self._rank], self._phase)
        for flag in others_of(self._flags, self._rank):
            self._device.await_value(self.stream, flag, self._phase)

    def release(self) -> None:
        """Write numbers that no stream waits for any more."""
        self._numbers[:] = (self._phase + _FAR) % (1 << 32)

    @property
    def late(self) -> tuple[int, ...]:
        """Ranks whose number is behind this one's; if none is, this one where it is not through."""
        numbers = self._numbers.copy()
        own = numbers[self._rank]
        behind = np.flatnonzero((numbers - own).view(np.int32) < 0)
        if not len(behind) and own != self._phase:
            return (self._rank,)
        return tuple(int(rank) for rank in behind)

    def scratch(self, nbytes: int) -> Span:
        """Return memory that the others map."""
        if self._scratch is None or self._scratch.nbytes < nbytes:
            self._scratch = self._regions.take(nbytes)
        return self._scratch[:nbytes]

    def outline(self, work: Work) -> bytes:
        """Return where this rank's arrays are."""
        source = self._find(work.source)
        if isinstance(work, Update):
            return Outline(source, self._find(work.target)).pack()
        if isinstance(work, Reduce):
            target = self._find(work.target)
            is_private = not source.region or (is_written_by_others(work) and not target.region)
            is_private = is_private and work.source.count > 0
            return Outline(source, target, self._staging_if(is_private)).pack()
        shown = work.source.nbytes if work.source is not None and not source.region else 0
        return Outline(source, NOWHERE, self._staging_if(shown > 0), shown).pack()

    def phases(self, work: Work, outlines: Sequence[bytes]) -> Iterator[None]:
        """See GpuTransport."""
        view = View(
            self._rank,
            [Outline.unpack(each) for each in outlines],
            self._capacity,
            lambda: self._own_staging().address,
            lambda rank, address: self._neighbours[rank].find(address),
        )
        for number, commands in enumerate(ipc_commands.phases(work, view)):
            if number:
                yield
            for each in commands:
                if isinstance(each, Copy):
                    self._device.copy(self.stream, each.target, each.source, each.nbytes)
                elif isinstance(each, KernelReduction):
                    self._device.reduce(self.stream, each)
                else:
                    self._device.update(self.stream, each)

    def close(self, *, is_clean: bool) -> None:
        """Unmap the others' memory, and free the rest; see GpuTransport."""
        if is_clean:
            for neighbour in self._neighbours:
                neighbour.close()
            self._device.free_stream(self.stream)
            self._host.unregister(self._shared)
            self._staging = self._scratch = None

    def _find(self, span: Span | None) -> Address:
        return NOWHERE if span is None or not span.count else self._regions.find(span)

    def _staging_if(self, is_needed: bool) -> Address:
        return self._regions.find(self._own_staging()) if is_needed else NOWHERE

    def _own_staging(self) -> Span:
        if self._staging is None:
            self._staging = self._regions.take(self._capacity)
        return self._staging
