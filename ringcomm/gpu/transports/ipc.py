"""The transport over CUDA IPC: one kernel per GPU reads from all ranks, and writes to all.

ipc_commands.py decides on commands; IpcTransport enqueues them on the stream. Streams
wait for each other through flags, one number per rank in host memory that all ranks map. To meet
the others, a stream increments its own rank's flag and waits for the other flags. No kernel spins.
So writing the flags ends all waits, see release(), and reading them shows which ranks are late.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np

from ringcomm.arrays.base import Bytes, Span
from ringcomm.errors import RingcommError
from ringcomm.gpu.device.base import Device
from ringcomm.gpu.device.ipc_pool import PeerMemory
from ringcomm.gpu.device.memory import NOWHERE, Address
from ringcomm.gpu.device.pinned_pool import PAGE_NBYTES, HostPool
from ringcomm.gpu.kernels.base import Kernel
from ringcomm.gpu.transports import ipc_commands
from ringcomm.gpu.transports.ipc_commands import (
    Command,
    Copy,
    MappedView,
    Outline,
    is_written_by_others,
    others_of,
)
from ringcomm.gpu.transports.slices import staging_nbytes
from ringcomm.gpu.transports.works import GpuReduce, Work

LINE = 128  # bytes between two flags: no two share a cache line
_SIGNATURE = 0x52430000  # plus the number of a rank
_READ, _DONE = 1, 2  # words of this rank's line that only try_out() uses
_RELEASED = 3  # the word of the first rank's line that any release() sets to 1
_TRY_S = 20
_LOOK_EVERY_S = 2e-5
_MOST_KEPT = 512  # reductions of which something is kept
_Key = tuple[object, ...]
T = TypeVar("T")
_FAR = 1 << 30  # ahead of any value for which a stream waits


def flags_nbytes(size: int) -> int:
    return -(-size * LINE // PAGE_NBYTES) * PAGE_NBYTES


class IpcTransport:
    """GpuTransport of ranks that map each other's GPU memory.

    Args:
        device: this rank's GPU.
        rank: number of this rank in the team.
        size: number of ranks.
        flags: zeroed host memory of flags_nbytes() that all ranks map.
        host: the pool that registers the flags with the GPU.
        reducers: for each rank, the rank that reduces on its GPU: the first one there.
    """

    has_outlines = True

    def __init__(
        self,
        device: Device,
        rank: int,
        size: int,
        *,
        flags: Bytes,
        host: HostPool,
        reducers: tuple[int, ...],
    ) -> None:
        self._reducers = reducers
        self._reduces = reducers[rank] == rank
        self._device = device
        self._rank = rank
        self._regions = device.regions
        lines = flags.view(np.uint32)[: size * LINE // 4].reshape(size, -1)
        self._flags, self._line = lines[:, 0], lines[rank]
        self._released = lines[0, _RELEASED : _RELEASED + 1]
        self._signed: Span | None = None
        self._flag_memory, self._host = flags, host
        start = host.register(flags)
        self._flag_addresses = [start + LINE * r for r in range(size)]
        self._flags_of_others = tuple(others_of(self._flag_addresses, rank))
        self._peers = [PeerMemory(device) for _ in range(size)]
        self._phase = 0  # value of this rank's flag once the stream's work is done
        self._capacity = staging_nbytes(size)
        self._staging: Span | None = None
        self._scratch: Span | None = None
        self._kept: dict[_Key, Sequence[Sequence[Command]]] = {}  # commands
        self._outlines: dict[_Key, bytes] = {}
        self.stream = device.new_stream()
        self.meets_on_stream = device.has_stream_values

    def sign(self, memory: Span) -> None:
        """Write this rank's number to memory that the others try_out(); blocks until it is there.

        Nothing else is written to that memory until the transport is closed.
        """
        self._signed = memory
        self._device.write_value(self.stream, memory.address, _SIGNATURE + self._rank)
        self._finish(1)

    def try_out(self, addresses: Sequence[Address]) -> None:
        """Map memory of each rank, which may fail in containers even if the memory was exported.

        Args:
            addresses: what each rank has signed, by rank; NOWHERE: that rank has a problem.

        Raises:
            RingcommError: other memory was mapped.
        """
        own = self._flag_addresses[self._rank]
        for rank in others_of(range(len(self._peers)), self._rank):
            if addresses[rank] == NOWHERE:
                continue
            at = self._peers[rank].find(addresses[rank])
            self._device.copy(self.stream, own + 4 * _READ, at, 4)
            self._finish(2 + rank)
            found, wanted = int(self._line[_READ]), _SIGNATURE + rank
            if found != wanted:
                raise RingcommError(
                    f"CUDA IPC maps other memory than that of rank {rank} of the group: it holds "
                    f"{found:#x} instead of {wanted:#x}"
                )

    def _finish(self, number: int) -> None:
        """Wait until the stream's work is done; no other rank is part of it."""
        at = self._flag_addresses[self._rank] + 4 * _DONE
        self._device.write_value(self.stream, at, number)
        deadline = time.monotonic() + _TRY_S
        while self._line[_DONE] != number:
            if time.monotonic() > deadline:
                raise RingcommError(f"the GPU did not copy 4 bytes in {_TRY_S} s")
            time.sleep(_LOOK_EVERY_S)  # a word that the GPU writes

    def meet(self) -> None:
        self._phase = (self._phase + 1) % (1 << 32)
        own, others = self._flag_addresses[self._rank], self._flags_of_others
        self._device.write_and_await(self.stream, own, others, self._phase)

    def release(self) -> None:
        """Set the flags of the others to a value for which no stream waits.

        The streams of the others may go on, too, before they know of the error: see is_released.
        """
        self._released[0] = 1  # before any flag
        self._flags[np.arange(len(self._flags)) != self._rank] = (self._phase + _FAR) % (1 << 32)

    @property
    def is_released(self) -> bool:
        return bool(self._released[0])

    @property
    def late(self) -> tuple[int, ...]:
        """Ranks whose flag is behind this rank's; else this rank, if its stream is not done."""
        flags = self._flags.copy()
        own = flags[self._rank]
        behind = np.flatnonzero((flags - own).view(np.int32) < 0)
        if not len(behind) and own != self._phase:
            return (self._rank,)
        return tuple(int(rank) for rank in behind)

    def scratch(self, nbytes: int) -> Span:
        if self._scratch is None or self._scratch.nbytes < nbytes:
            self._scratch = self._regions.take(nbytes, self.stream)
        return self._scratch[:nbytes]

    def kernels(self, work: Work) -> Sequence[Kernel]:
        return ipc_commands.kernels(work, len(self._peers))

    def outline(self, work: Work) -> bytes:
        source = self._find(work.source)
        if isinstance(work, GpuReduce):
            target = self._find(work.target)
            is_written = is_written_by_others(work, reduces=self._reduces)
            is_private = not source.region or (is_written and not target.region)
            is_private = is_private and work.source.count > 0
            packed = Outline(source, target, self._staging_if(is_private)).pack()
            if not is_private:  # what can be mapped stays where it is
                _keep(self._outlines, _key_of(work, ()), packed)
            return packed
        shown = work.source.nbytes if work.source is not None and not source.region else 0
        return Outline(source, NOWHERE, self._staging_if(shown > 0), shown).pack()

    def known_outline(self, work: Work) -> bytes | None:
        """See GpuTransport; those of reductions are known from the second time on."""
        key = _key_of(work, ())
        return self._outlines.get(key) if key else None

    def phases(self, work: Work, outlines: Sequence[bytes]) -> Iterator[None]:
        return self._enqueue(self._commands(work, outlines))

    def _commands(self, work: Work, outlines: Sequence[bytes]) -> Sequence[Sequence[Command]]:
        """Return the commands of each phase; those of a reduction are kept for the next like it.

        What is mapped stays where it is, so they depend on nothing but this key.
        """
        key = _key_of(work, outlines)
        found = self._kept.get(key) if key else None
        if found is None:
            found = list(ipc_commands.phases(work, self._view(outlines)))
            _keep(self._kept, key, found)
        return found

    def _view(self, outlines: Sequence[bytes]) -> MappedView:
        return MappedView(
            self._rank,
            self._reducers,
            [Outline.unpack(each) for each in outlines],
            self._capacity,
            lambda: self._own_staging().address,
            lambda rank, address: self._peers[rank].find(address),
        )

    def _enqueue(self, by_phase: Sequence[Sequence[Command]]) -> Iterator[None]:
        for number, commands in enumerate(by_phase):
            if number:
                yield
            for each in commands:
                if isinstance(each, Copy):
                    self._device.copy(self.stream, each.target, each.source, each.nbytes)
                else:
                    self._device.launch(self.stream, each)

    def close(self, *, is_clean: bool) -> None:
        """Free everything if `is_clean`, else nothing; see GpuTransport."""
        if is_clean:
            for peer in self._peers:
                peer.close()
            self._device.free_stream(self.stream)
            self._host.unregister(self._flag_memory)
            self._staging = self._scratch = self._signed = None
            self._kept.clear()
            self._outlines.clear()

    def _find(self, span: Span | None) -> Address:
        return NOWHERE if span is None or not span.count else self._regions.find(span)

    def _staging_if(self, is_needed: bool) -> Address:
        return self._regions.find(self._own_staging()) if is_needed else NOWHERE

    def _own_staging(self) -> Span:
        if self._staging is None:
            self._staging = self._regions.take(self._capacity, self.stream)
        return self._staging


def _keep(kept: dict[_Key, T], key: _Key | None, value: T) -> None:
    if key is None:
        return
    if len(kept) >= _MOST_KEPT:
        del kept[next(iter(kept))]
    kept[key] = value


def _key_of(work: Work, outlines: Sequence[bytes]) -> _Key | None:
    """Return all that the commands of a reduction depend on; None for other works."""
    if not isinstance(work, GpuReduce):
        return None
    target = work.target and work.target.address
    parts = tuple((part.start, part.stop) for part in work.parts) if work.parts else ()
    x = work.source
    return (x.address, x.count, x.dtype.name, target, work.op, work.to, work.root, parts, *outlines)
