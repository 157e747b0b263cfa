"""Sets up the transport of a group's arrays on GPUs: the best one that works on all ranks.

Every rank sends and receives the same messages, even if something fails on it. An error of CUDA or
NCCL becomes a text that all ranks receive, and they go on to the next transport together.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from ringcomm.arrays.base import Bytes
from ringcomm.engine.core.agreement import broadcast_bytes, gather_alike, gather_bytes
from ringcomm.errors import ConfigError
from ringcomm.gpu.device.ipc_allocator_and_address import NOWHERE, Address
from ringcomm.gpu.device.shared_pinned_pool import whole_pages
from ringcomm.gpu.executor.streams import GpuMemory
from ringcomm.gpu.transports.base import GpuTransport
from ringcomm.gpu.transports.ipc import IpcTransport, flags_nbytes
from ringcomm.gpu.transports.nccl import NcclTransport
from ringcomm.gpu.transports.nccl_base import NcclBinding
from ringcomm.gpu.transports.transport_choice import Facts, GpuChoice, choose_transport
from ringcomm.transport.channel import Channel, Until, Wait

if TYPE_CHECKING:
    from ringcomm.engine.core.context import EngineContext

_log = logging.getLogger("ringcomm")
_ON_THE_FIRST = "see the first rank"  # the only rank that knows why
R = TypeVar("R")


class _Attempt(NamedTuple, Generic[R]):
    """The result of a call, or why it failed."""

    result: R | None
    problem: str = ""


def _attempt(call: Callable[[], R]) -> _Attempt[R]:
    try:
        return _Attempt(call())
    except Exception as error:  # noqa: BLE001 - also CUDA's own; the next transport may work
        return _Attempt(None, f"{type(error).__name__}: {error}")


async def set_up_transport(
    provider: Callable[[], NcclBinding], engine: EngineContext, memory: GpuMemory, t: Channel
) -> tuple[GpuChoice, GpuTransport | None]:
    """Return the choice, the same on all ranks, and the transport (None: host memory).

    Raises:
        ConfigError: on all ranks, if RINGCOMM_GPU_TRANSPORT names an unusable transport.
    """
    setup = _Setup(provider, engine, memory, t)
    facts = [Facts.unpack(each) for each in await gather_bytes(setup.facts().pack(), t)]
    choice = choose_transport(facts, engine.settings.gpu_transport)
    transport = None
    while choice.transport != "staged":
        problem = choice.unfit.get(choice.transport)
        if problem is None:
            transport, problem = await setup.attempt(choice.transport)
        if problem is None:
            break
        choice = choice.without(problem)
    if choice.transport == "staged" and not choice.is_forced and t.rank == 0 and t.size > 1:
        _log.warning("arrays on GPUs go through host memory: %s", choice)
    return choice, transport


class _Setup:
    """One rank's part in set_up_transport()."""

    def __init__(
        self,
        provider: Callable[[], NcclBinding],
        engine: EngineContext,
        memory: GpuMemory,
        t: Channel,
    ) -> None:
        self._provider = provider
        self._node = engine.transport.node
        self._memory, self._device = memory, memory.device
        self._t = t

    def facts(self) -> Facts:
        """Return the facts about this rank, from which all ranks choose."""
        t, device = self._t, self._device
        shares_memory = self._node is not None or t.size == 1
        node = t.nodes[t.rank] if shares_memory else -1 - t.rank
        facts = Facts(device.uuid, node, device.reaches, device.can_export)
        try:
            nccl = self._provider()
        except ConfigError as error:
            return replace(facts, no_nccl=str(error))
        return replace(facts, nccl=nccl.version, shares_gpus=nccl.shares_gpus)

    async def attempt(self, kind: str) -> tuple[GpuTransport | None, str | None]:
        """Return a transport, or the problem of the first rank that has one."""
        t = self._t
        mine = await (self._nccl() if kind == "nccl" else self._ipc())
        problems = [each.decode() for each in await gather_bytes(mine.problem.encode(), t)]
        found = [f"rank {t.members[r]}: {each}" for r, each in enumerate(problems) if each]
        if not found:
            return mine.result, None
        if mine.result is not None:
            mine.result.close(is_clean=False)
        return None, found[0]

    async def _nccl(self) -> _Attempt[GpuTransport]:
        t, device = self._t, self._device
        made = _Attempt[bytes](None, _ON_THE_FIRST)
        if t.rank == 0:
            made = _attempt(lambda: self._provider().unique_id())
        unique_id = await broadcast_bytes(made.result or b"", 0, t)
        if not unique_id:
            return _Attempt(None, made.problem)

        def connect() -> GpuTransport:
            with device.active():
                communicator = self._provider().connect(unique_id, t.rank, t.size)
                return NcclTransport(device, communicator, t.rank, t.size)

        attempts: list[_Attempt[GpuTransport]] = []
        thread = threading.Thread(
            target=lambda: attempts.append(_attempt(connect)), name="ringcomm-nccl", daemon=True
        )
        thread.start()  # connect() blocks until all ranks connect
        await Wait((Until(lambda: not thread.is_alive()),))
        return attempts[0]

    async def _ipc(self) -> _Attempt[GpuTransport]:
        t = self._t
        flags, problem = await self._flags()
        made = _Attempt[tuple[IpcTransport, Address]](None, problem)
        if flags is not None:
            made = _attempt(lambda: self._connect_ipc(flags))
        transport, address = made.result or (None, NOWHERE)
        addresses = [Address.unpack(each) for each in await gather_alike(address.pack(), t)]
        if transport is None:
            return _Attempt(None, made.problem)
        return _Attempt(transport, _attempt(lambda: transport.try_out(addresses)).problem)

    async def _flags(self) -> _Attempt[Bytes]:
        """Return memory for the flags; the first rank makes it, and all ranks map it."""
        t, node = self._t, self._node
        nbytes = flags_nbytes(t.size)
        made = _Attempt[Bytes](None, _ON_THE_FIRST)

        def make() -> Bytes:
            flags = whole_pages(nbytes, lambda n: None if node is None else node.empty(n))
            flags[:] = 0
            return flags

        offset = b""
        if t.rank == 0:
            made = _attempt(make)
            if made.result is not None and node is not None:
                offset = node.offset_of(made.result).to_bytes(8, "little")
        offset = await broadcast_bytes(offset, 0, t)
        if t.rank == 0 or not offset:
            return made
        assert node is not None
        return _attempt(lambda: node.view(t.members[0], int.from_bytes(offset, "little"), nbytes))

    def _connect_ipc(self, flags: Bytes) -> tuple[IpcTransport, Address]:
        t, memory, regions = self._t, self._memory, self._device.regions
        with self._device.active():
            address = regions.find(regions.take(1))
            transport = IpcTransport(self._device, t.rank, t.size, flags=flags, host=memory.host)
        return transport, address
