"""The ranks of a group on their GPUs: their transport, and the order of what they launch.

The ranks agree on an operation as on any other. Then the group's first rank says the operation's
place among launches, because streams that wait for each other must do so in one order everywhere.
When it is next, each rank puts its part on its stream, and is done: the caller's stream waits, not
the caller. A task (follow()) watches the stream: it has the deadline of any operation, and ends the
stream's waits if a rank dies.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from ringcomm.arrays import DTYPES, Flat, Span
from ringcomm.collectives.algorithms import tree
from ringcomm.engine.core.agreement import gather_alike, node_or
from ringcomm.engine.core.ledger import NO_GROUP, Ticket, base_of
from ringcomm.errors import RingcommError
from ringcomm.gpu.device.packing import pack, unpack
from ringcomm.gpu.executor.streams import Event, GpuMemory, Issue, Launched, Reached
from ringcomm.gpu.executor.transport_setup import set_up_transport
from ringcomm.gpu.transports.base import GpuTransport, Job
from ringcomm.gpu.transports.choice import GpuChoice
from ringcomm.gpu.transports.nccl import Provider
from ringcomm.transport.channel import Channel, Until, Wait

if TYPE_CHECKING:
    from ringcomm.engine.core.group import Group

_log = logging.getLogger("ringcomm")
_RELEASE_EVERY_S, _RELEASE_OFTEN_FOR_S, _RELEASE_SELDOM_S = 0.005, 10.0, 0.2
# A stream holds about 1000 entries, then blocks whoever adds more; a phase adds 4 per rank.
_PHASES_AHEAD = 16
_ERROR_WITHIN_S = 1.0
_END: Final = object()
R = TypeVar("R")


class GpuTeam:
    """The team of one group, on one rank.

    Args:
        provider: returns the binding of NCCL.

    Attributes:
        choice: of the transport, and why; None before the first operation.
        transport: None: arrays go through host memory, by the CPU's collectives.
        n_launched: how many operations this rank has put on its stream.
    """

    def __init__(self, provider: Callable[[], Provider], group: Group, group_id: int) -> None:
        self._provider = provider
        self._engine = group.engine
        self._group = weakref.ref(group)
        self._members = group.ranks
        self._rank, self._size = group.index, group.size
        self._group_id = group_id
        self._base = base_of(group_id, "on the GPU")
        self._own = base_of(NO_GROUP, f"rank {self._engine.job_rank} on the GPU, {group_id}")
        self._n_alone = 0
        self._n_ordered = 0  # on the first rank: how many have been given their place
        self._turn = 0
        self._newest: dict[int, Event] = {}  # stream: last event followed
        self._memory: GpuMemory | None = None
        self.choice: GpuChoice | None = None
        self.transport: GpuTransport | None = None
        self.n_launched = 0
        self._announced: set[str] = set()
        self._engine.extensions.add_entered(self._base, self._has_entered)

    # --- order ------------------------------------------------------------------------------------
    @contextlib.asynccontextmanager
    async def turn(self, t: Channel, issue: Issue) -> AsyncIterator[None]:
        """Return when it is this operation's turn, with the transport chosen.

        Leaving the block gives the turn to the next one.

        Raises:
            ConfigError: on all ranks: RINGCOMM_GPU_TRANSPORT cannot be met.
            RingcommError: the arrays are on another GPU than before.
        """
        if t.meeting is not None and not t.has_met:
            await t.meet()
        place = await self._place(t)
        if self._turn != place:
            await Wait((Until(lambda: self._turn == place),))
        try:
            if self._memory is None:
                made = await set_up_transport(self._provider, self._engine, issue.memory, t)
                (self.choice, self.transport), self._memory = made, issue.memory
            else:
                self._require_same_gpu(t, issue)
            yield
        finally:
            self._turn += 1

    def _require_same_gpu(self, t: Channel, issue: Issue) -> None:
        now, before = issue.memory.device.index, self._gpu.device.index
        if now != before:
            raise RingcommError(
                f"{self._engine.pending.label_of(t.key)}: this rank's arrays are on GPU {now}, "
                f"those before were on GPU {before}. A rank uses one GPU per group: call "
                "torch.cuda.set_device() or cupy.cuda.Device().use() once, before the first array"
            )

    async def _place(self, t: Channel) -> int:
        """Return the place that the first rank gives to this operation, now that all are in it."""
        number = np.zeros(1, np.int64)
        if t.rank == 0:
            number[0] = self._n_ordered
            self._n_ordered += 1
        await node_or(tree, t).broadcast_(Flat(number.view(np.uint8), DTYPES["int64"]), 0, t)
        return int(number[0])

    # --- launches ---------------------------------------------------------------------------------
    async def put(self, t: Channel, job: Job) -> None:
        """Put a job on the stream, in the turn of its operation."""
        transport, device = self._own_transport, self._gpu.device
        outlines = await gather_alike(transport.outline(job.work), t)
        if job.buffer is not None:
            with device.active():
                pack(device, transport.stream, job.packed, job.buffer)
        phases = transport.phases(job.work, outlines)
        for number in itertools.count(1):
            with device.active():
                if next(phases, _END) is _END:
                    break
                if transport.meets_on_stream:
                    transport.meet()
            if not transport.meets_on_stream or number % _PHASES_AHEAD == 0:
                await Wait((Reached(Event(device, transport.stream)),))
            if not transport.meets_on_stream:
                await gather_alike(b"here", t)
        if job.buffer is not None:
            with device.active():
                unpack(device, transport.stream, job.unpacked, job.buffer)

    def begin(self, issue: Issue) -> int:
        """Return the stream, which now waits for the arrays of an operation."""
        stream = self._own_transport.stream
        issue.let_wait(stream)
        return stream

    def break_off(self, keeps: object) -> None:
        """End the stream's waits: an operation was put on it only in part."""
        self._free_stream(Event(self._gpu.device, self._own_transport.stream), keeps)

    def follow(
        self,
        t: Channel,
        issue: Issue,
        stream: int,
        result: R,
        *,
        keeps: Sequence[object],
        waits_for_others: bool = True,
    ) -> Launched[R]:
        """Return the deferred result, and watch the stream until its work so far is done.

        `keeps` lives until then. Deaths of other ranks matter only if it `waits_for_others`.
        """
        done = Event(issue.memory.device, stream)
        reached = Reached(done, behind=self._newest.get(stream))
        self._newest[stream] = done
        launched = Launched(result, issue, done, self._engine.state.require_unbroken)
        if waits_for_others:
            self.n_launched += 1
            members: tuple[int, ...] = self._members
            ticket = Ticket(None, self._base, self.n_launched)
        else:
            self._n_alone += 1
            members = (self._engine.job_rank,)
            ticket = Ticket(None, self._own, self._n_alone)

        group = self._group()

        async def watch() -> None:
            kept = [keeps, result, group]  # the group must outlive its streams' work
            is_reached = False
            try:
                await Wait((reached,))
                is_reached = True
            finally:
                if not is_reached:
                    self._free_stream(done, kept)

        label = f"{self._engine.pending.label_of(t.key)} on the GPU"
        late = self._late if waits_for_others else tuple
        self._engine.extensions.follow_up(label, members, watch(), ticket, late=late)
        return launched

    def _late(self) -> tuple[int, ...]:
        return tuple(self._members[rank] for rank in self._own_transport.late)

    def scratch(self, nbytes: int) -> Span:
        """Return memory on the GPU, see GpuTransport."""
        with self._gpu.device.active():
            return self._own_transport.scratch(nbytes)

    def announce(self, why: str) -> None:
        """Warn once, on the first rank, that operations of a kind go through host memory."""
        if self._rank == 0 and why not in self._announced:
            self._announced.add(why)
            _log.warning("an operation on a GPU goes through host memory: %s", why)

    def _has_entered(self, number: int) -> bool:
        return number <= self.n_launched

    def close(self, *, is_clean: bool) -> None:
        """Give everything back; see GpuTransport."""
        self._engine.extensions.drop_entered(self._base)
        if self.transport is not None:
            self.transport.close(is_clean=is_clean)

    @property
    def _gpu(self) -> GpuMemory:
        assert self._memory is not None
        return self._memory

    @property
    def _own_transport(self) -> GpuTransport:
        assert self.transport is not None
        return self.transport

    def _free_stream(self, done: Event, keeps: object) -> None:
        """End its waits until `done` is reached; what it writes is worthless."""
        transport = self.transport
        if transport is None:
            return

        def release() -> None:
            begin = time.monotonic()
            while not self._engine.state.is_broken and time.monotonic() < begin + _ERROR_WITHIN_S:
                time.sleep(_RELEASE_EVERY_S)  # who sees the stream go on must also see the error
            with contextlib.suppress(RingcommError):  # the GPU has failed: nothing waits any more
                while not done.is_reached:
                    transport.release()
                    is_soon = time.monotonic() < begin + _RELEASE_OFTEN_FOR_S
                    # The stream may come to its next wait.
                    time.sleep(_RELEASE_EVERY_S if is_soon else _RELEASE_SELDOM_S)
            del keeps_alive[:]

        keeps_alive = [keeps]
        threading.Thread(target=release, name="ringcomm-gpu-release", daemon=True).start()
