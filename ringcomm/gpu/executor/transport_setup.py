"""How the ranks of a group come to exchange what is on their GPUs: the best transport that works.

What a rank sends and awaits here is the same whatever fails: a problem of CUDA or of NCCL becomes
a text that all ranks hear, and all of them go on to the next transport together.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from ringcomm.arrays.base import Bytes
from ringcomm.engine.core.agreement import broadcast_bytes, gather_alike, gather_bytes
from ringcomm.errors import ConfigError
from ringcomm.gpu.device.host_pool import whole_pages
from ringcomm.gpu.device.regions import NOWHERE, Address
from ringcomm.gpu.executor.gpus import GpuMemory, Gpus
from ringcomm.gpu.transports.base import Mover
from ringcomm.gpu.transports.choice import Facts, GpuChoice, choose_transport
from ringcomm.gpu.transports.ipc import IpcMover, flags_nbytes
from ringcomm.gpu.transports.nccl import NcclMover
from ringcomm.transport.channel import Channel, Wait

if TYPE_CHECKING:
    from ringcomm.engine.core.context import EngineContext

_log = logging.getLogger("ringcomm")
_ON_THE_FIRST = "see the first rank"  # what another says, where that one alone knows why
R = TypeVar("R")


class Founded(NamedTuple):
    """What a group has begun with.

    Attributes:
        choice: how the ranks exchange, and why; the same on all of them.
        mover: what does it; None: host memory, by the CPU's collectives.
    """

    choice: GpuChoice
    mover: Mover | None


class _Tried(NamedTuple, Generic[R]):
    """What a call has returned, or why it has not."""

    result: R | None
    problem: str = ""


def _try(call: Callable[[], R]) -> _Tried[R]:
    try:
        return _Tried(call())
    except Exception as error:  # noqa: BLE001 - CUDA's own: the next transport may do
        return _Tried(None, f"{type(error).__name__}: {error}")


async def found(gpus: Gpus, engine: EngineContext, memory: GpuMemory, t: Channel) -> Founded:
    """Choose how the ranks exchange what is on their GPUs, and set it up.

    Raises:
        ConfigError: what RINGCOMM_GPU_TRANSPORT wants cannot be; on all ranks.
    """
    founding = _Founding(gpus, engine, memory, t)
    facts = [Facts.unpack(each) for each in await gather_bytes(founding.facts().pack(), t)]
    choice = choose_transport(facts, engine.settings.gpu_transport)
    mover = None
    while choice.transport != "staged":
        problem = choice.unfit.get(choice.transport)
        if problem is None:
            mover, problem = await founding.set_up(choice.transport)
        if problem is None:
            break
        choice = choice.without(problem)
    if choice.transport == "staged" and not choice.is_forced and t.rank == 0 and t.size > 1:
        _log.warning("arrays on GPUs go through host memory: %s", choice)
    return Founded(choice, mover)


class _Founding:
    """One rank's part in it; see found()."""

    def __init__(self, gpus: Gpus, engine: EngineContext, memory: GpuMemory, t: Channel) -> None:
        self._gpus = gpus
        self._node = engine.transport.node
        self._memory, self._device = memory, memory.device
        self._t = t

    def facts(self) -> Facts:
        """Return what the others need to know to choose."""
        t, device = self._t, self._device
        nccl, no_nccl, shares_gpus = 0, "", False
        try:
            nccl, shares_gpus = self._gpus.provider.version, self._gpus.provider.shares_gpus
        except ConfigError as error:
            no_nccl = str(error)
        shares_memory = self._node is not None or t.size == 1
        node = t.nodes[t.rank] if shares_memory else -1 - t.rank
        return Facts(
            uuid=device.uuid,
            name=device.name,
            node=node,
            reaches=device.reaches,
            can_export=device.can_export,
            nccl=nccl,
            no_nccl=no_nccl,
            shares_gpus=shares_gpus,
        )

    async def set_up(self, transport: str) -> tuple[Mover | None, str | None]:
        """Return what exchanges, or the problem that a rank has with it, the same on all."""
        t = self._t
        mine = await (self._nccl() if transport == "nccl" else self._ipc())
        problems = [each.decode() for each in await gather_bytes(mine.problem.encode(), t)]
        found = [f"rank {t.members[r]}: {each}" for r, each in enumerate(problems) if each]
        if not found:
            return mine.result, None
        if mine.result is not None:
            mine.result.close(is_clean=False)
        return None, found[0]

    async def _nccl(self) -> _Tried[Mover]:
        t, device = self._t, self._device
        made = _Tried[bytes](None, _ON_THE_FIRST)
        if t.rank == 0:
            made = _try(self._gpus.provider.unique_id)
        unique_id = await broadcast_bytes(made.result or b"", 0, t)
        if not unique_id:
            return _Tried(None, made.problem)

        def connect() -> Mover:
            with device.active():
                communicator = self._gpus.provider.connect(unique_id, t.rank, t.size)
                return NcclMover(device, communicator, t.rank, t.size)

        connecting = _InThread(lambda: _try(connect))
        await Wait((connecting,))
        return connecting.result

    async def _ipc(self) -> _Tried[Mover]:
        t = self._t
        flags, problem = await self._flags()
        made = _Tried[tuple[IpcMover, Address]](None, problem)
        if flags is not None:
            made = _try(lambda: self._mover(flags))
        mover, address = made.result or (None, NOWHERE)
        told = [Address.unpack(each) for each in await gather_alike(address.pack(), t)]
        if mover is None:
            return _Tried(None, made.problem)
        return _Tried(mover, _try(lambda: mover.try_out(told)).problem)

    async def _flags(self) -> _Tried[Bytes]:
        """Return memory of the first rank that all of them map."""
        t, node = self._t, self._node
        nbytes = flags_nbytes(t.size)
        made = _Tried[Bytes](None, _ON_THE_FIRST)

        def make() -> Bytes:
            flags = whole_pages(lambda n: None if node is None else node.empty(n), nbytes)
            flags[:] = 0
            return flags

        offset = b""
        if t.rank == 0:
            made = _try(make)
            if made.result is not None and node is not None:
                offset = node.offset_of(made.result).to_bytes(8, "little")
        offset = await broadcast_bytes(offset, 0, t)
        if t.rank == 0 or not offset:
            return made
        assert node is not None
        return _try(lambda: node.view(t.members[0], int.from_bytes(offset, "little"), nbytes))

    def _mover(self, flags: Bytes) -> tuple[IpcMover, Address]:
        t, memory = self._t, self._memory
        with self._device.active():
            memory.host.page(flags)
            address = memory.regions.find(memory.regions.take(1))
            mover = IpcMover(self._device, t.rank, t.size, flags=flags)
        return mover, address


class _InThread:
    """Request that waits for what blocks, in a thread that is left alone if nobody waits any more.

    Args:
        call: what blocks.

    Attributes:
        result: what it has returned, once test() is true.
    """

    source = -1

    def __init__(self, call: Callable[[], _Tried[Mover]]) -> None:
        self._call = call
        self.result = _Tried[Mover](None, "its thread has ended")
        self._thread = threading.Thread(target=self._run, name="ringcomm-nccl", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.result = self._call()

    def test(self) -> bool:
        """Return True once it has returned."""
        return not self._thread.is_alive()

    def cancel(self) -> None:
        """Leave it alone."""
