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
from ringcomm.gpu.device.base import Device
from ringcomm.gpu.device.memory import NOWHERE, Address
from ringcomm.gpu.device.pinned_pool import whole_pages
from ringcomm.gpu.executor.streams import GpuMemory
from ringcomm.gpu.transports.base import GpuTransport
from ringcomm.gpu.transports.ipc import IpcTransport, flags_nbytes
from ringcomm.gpu.transports.nccl import NcclTransport
from ringcomm.gpu.transports.nccl_base import NcclBinding
from ringcomm.gpu.transports.transport_choice import GpuChoice, GpuFacts, choose_transport
from ringcomm.transport.channel import Channel, Until, Wait

if TYPE_CHECKING:
    from ringcomm.engine.core.context import EngineContext

_log = logging.getLogger("ringcomm")
_ON_THE_FIRST = "see the first rank"  # the only rank that knows why
R = TypeVar("R")


class _Attempt(NamedTuple, Generic[R]):
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
    own = await memory.idle_calls.call(setup.facts)
    facts = [GpuFacts.unpack(each) for each in await gather_bytes(own.pack(), t)]
    first = {each.uuid: r for r, each in reversed(list(enumerate(facts)))}
    setup.reducers = tuple(first[each.uuid] for each in facts)
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
        self._adds_16bit = bool(engine.settings.nccl_16bit_sums)
        self._memory, self._device = memory, memory.device
        self._t = t
        self.reducers: tuple[int, ...] = ()  # see IpcTransport

    def facts(self) -> GpuFacts:
        t, device = self._t, self._device
        shares_memory = self._node is not None or t.size == 1
        node = t.nodes[t.rank] if shares_memory else -1 - t.rank
        facts = GpuFacts(device.uuid, node, device.reaches, device.can_export)
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
        t, device, call = self._t, self._device, self._memory.launcher.call
        made = _Attempt[bytes](None, _ON_THE_FIRST)
        if t.rank == 0:
            made = await call(lambda: _attempt(lambda: self._provider().unique_id()))
        unique_id = await broadcast_bytes(made.result or b"", 0, t)
        if not unique_id:
            return _Attempt(None, made.problem)

        connecting = _Connecting(device)
        try:
            # A rank that lacks a communicator must not leave the others alone with theirs.
            attempt = await connecting.run(
                lambda: NcclTransport(
                    device,
                    self._provider().connect(unique_id, t.rank, t.size),
                    t.rank,
                    t.size,
                    nodes=t.nodes,
                    adds_16bit=self._adds_16bit,
                )
            )
            problems = await gather_bytes(attempt.problem.encode(), t)
            if any(problems):
                return attempt
            return await connecting.run(connecting.transport.connect_all)
        except BaseException:  # a rank has died, or did not come in time
            connecting.give_up()
            raise

    async def _ipc(self) -> _Attempt[GpuTransport]:
        t, call = self._t, self._memory.idle_calls.call
        flags, problem = await self._flags()
        made = _Attempt[tuple[IpcTransport, Address]](None, problem)
        if flags is not None:
            made = await call(lambda: _attempt(lambda: self._connect_ipc(flags)))
        transport, address = made.result or (None, NOWHERE)
        addresses = [Address.unpack(each) for each in await gather_alike(address.pack(), t)]
        if transport is None:
            return _Attempt(None, made.problem)
        tried = await call(lambda: _attempt(lambda: transport.try_out(addresses)))
        return _Attempt(transport, tried.problem)

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
        signed = regions.take(1, None)  # the transport is through with it at once
        address = regions.find(signed)
        transport = IpcTransport(
            self._device, t.rank, t.size, flags=flags, host=memory.host, reducers=self.reducers
        )
        transport.sign(signed)
        return transport, address


class _Connecting:
    """Threads that make a communicator and its connections, which blocks until all ranks do.

    NCCL makes the connections of a kind of operation with the first one, and blocks meanwhile. If a
    rank dies, only an abort ends that.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._transport: NcclTransport | None = None
        self._is_given_up = False

    @property
    def transport(self) -> NcclTransport:
        assert self._transport is not None
        return self._transport

    async def run(self, call: Callable[[], NcclTransport | None]) -> _Attempt[GpuTransport]:
        """Make a call in a thread; keep the transport that it returns, if any."""
        attempts: list[_Attempt[GpuTransport]] = []

        def main() -> None:
            with self._device.active():
                self._device.leave_captures_alone()
                made = _attempt(call)
                if made.result is not None:
                    self._keep(made.result)
            attempts.append(_Attempt(self._transport, made.problem))

        thread = threading.Thread(target=main, name="ringcomm-nccl", daemon=True)
        thread.start()
        await Wait((Until(lambda: not thread.is_alive()),))
        return attempts[0]

    def give_up(self) -> None:
        with self._lock:
            self._is_given_up = True
        if self._transport is not None:
            self._transport.release()

    def _keep(self, transport: NcclTransport) -> None:
        with self._lock:
            self._transport = transport
        if self._is_given_up:
            transport.release()
