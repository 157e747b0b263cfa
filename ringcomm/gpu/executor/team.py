"""The ranks of a group on their GPUs: their transport, and the order of their launches.

The ranks agree on an operation as on any other. Then the group's first rank gives the operation its
place in the order of launches: streams that wait for each other need the same order on all ranks.
In this order, each rank enqueues its part on its stream, and returns. The caller does not wait for
the result, but the caller's stream does. A task, see _watch(), watches the stream. The task has the
same deadline as any operation, and ends the stream's waits if a rank dies.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from ringcomm.arrays import DTYPES, Flat, Span
from ringcomm.collectives.algorithms import tree
from ringcomm.engine.core.agreement import gather_alike, node_or
from ringcomm.engine.core.engine_state import EngineState
from ringcomm.engine.core.ledger import NO_GROUP, Ticket, base_of
from ringcomm.errors import RingcommError
from ringcomm.gpu.device import packing
from ringcomm.gpu.executor.launcher import Launcher
from ringcomm.gpu.executor.streams import Event, GpuMemory, Issue, Launched, Mark, Marks, Reached
from ringcomm.gpu.executor.transport_setup import set_up_transport
from ringcomm.gpu.kernels.base import Kernel
from ringcomm.gpu.kernels.scale import ScaleKernel
from ringcomm.gpu.transports.base import GpuTransport
from ringcomm.gpu.transports.nccl_base import NcclBinding
from ringcomm.gpu.transports.transport_choice import GpuChoice
from ringcomm.gpu.transports.works import Job, Reduce
from ringcomm.transport.channel import Channel, Until, Wait

if TYPE_CHECKING:
    from ringcomm.engine.core.group import Group

_log = logging.getLogger("ringcomm")
_RELEASE_EVERY_S, _RELEASE_OFTEN_FOR_S, _RELEASE_SELDOM_S = 0.005, 10.0, 0.2
# A stream with about 1000 entries blocks a thread that adds more; a phase adds 4 per rank, and most
# operations have 3 phases or fewer.
MOST_UNDER_WAY: Final = 16
_PHASES_AHEAD = 16
_ERROR_WITHIN_S = 1.0
R = TypeVar("R")


class _UnderWay:
    """An operation that this rank enqueues; see IdleCalls.note_under_way()."""

    is_noted = False

    def __init__(self) -> None:
        self.is_over: Callable[[], bool] = lambda: False

    def ask(self) -> bool:
        """Return True once the operation's work on the stream is done."""
        return self.is_over()


Jobs = Sequence[Job] | Callable[["GpuTeam"], Sequence[Job]]


class GpuTeam:
    """The team of one group, on one rank.

    Args:
        provider: function that returns the binding of NCCL.
        group: the group whose team this is.
        group_id: the group's number.

    Attributes:
        choice: the choice of the transport; None before the first operation.
        transport: the transport; None: the CPU's collectives are used, through host memory.
        n_launched: the number of operations that this rank has enqueued on its stream.
    """

    def __init__(self, provider: Callable[[], NcclBinding], group: Group, group_id: int) -> None:
        self._provider = provider
        self._engine = group.engine
        self._group = weakref.ref(group)
        self._members = group.ranks
        self._rank = group.index
        self._base = base_of(group_id, "on the GPU")
        self._own = base_of(NO_GROUP, f"rank {self._engine.job_rank} on the GPU, {group_id}")
        self._n_alone = 0  # operations that do not wait for other ranks
        self._n_ordered = 0  # on the first rank: the number of operations that have a place
        self._turn = 0  # the place of the operation that may launch
        self._under_way: deque[Mark] = deque()  # of operations that wait for other ranks
        self._marks: Marks | None = None
        self._memory: GpuMemory | None = None
        self.choice: GpuChoice | None = None
        self.transport: GpuTransport | None = None
        self.n_launched = 0
        self._announced: set[str] = set()
        self._loaded_by_all: set[tuple[str, ...]] = set()  # kernels, if there are no outlines
        self._engine.extensions.add_entered(self._base, self._has_entered)

    # --- order ------------------------------------------------------------------------------------
    @contextlib.asynccontextmanager
    async def turn(self, t: Channel, issue: Issue) -> AsyncIterator[None]:
        """Return a context in which it is this operation's turn, and the transport is set up.

        Raises:
            ConfigError: on all ranks, if RINGCOMM_GPU_TRANSPORT names an unusable transport.
            RingcommError: the arrays are on another GPU than those of earlier operations.
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
                if self.transport is not None:
                    make = partial(Marks, issue.memory, self.transport.stream)
                    self._marks = await issue.memory.idle_calls.call(make)
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
                f"its earlier arrays were on GPU {before}. A rank uses one GPU per group: call "
                "torch.cuda.set_device() or cupy.cuda.Device().use() once, before the first array"
            )

    async def _place(self, t: Channel) -> int:
        """Return the place that the first rank gives this operation; collective."""
        number = np.zeros(1, np.int64)
        if t.rank == 0:
            number[0] = self._n_ordered
            self._n_ordered += 1
        await node_or(tree, t).broadcast_(Flat(number.view(np.uint8), DTYPES["int64"]), 0, t)
        return int(number[0])

    # --- launches ---------------------------------------------------------------------------------
    async def carry_out(
        self,
        t: Channel,
        issue: Issue,
        jobs: Jobs,
        finish: Callable[[], R],
        keeps: Sequence[object],
    ) -> Launched[R]:
        """Enqueue an operation in its turn, and watch the stream until the operation is done.

        Args:
            t: the operation's channel.
            issue: the operation's Issue.
            jobs: what to enqueue, or a function that returns it, and may call CUDA.
            finish: function that is called last, while the team's stream is the current stream;
                returns the result.
            keeps: objects that live until the stream's work is done.
        """
        await self._await_room()
        todo, outlines = await _prepared(self, jobs, issue.memory.launcher)
        keeps = (*todo, *keeps)
        await self._load_kernels(t, todo)
        under_way = _UnderWay()
        try:
            for job, outline in zip(todo[:-1], outlines, strict=False):
                await self.put(t, job, outline, issue, under_way)
            end = partial(self._end, issue, finish)
            launched = await self.put(t, todo[-1], outlines[-1], issue, under_way, end=end)
        except BaseException:  # a death, or an error of CUDA: nothing watches the stream so far
            under_way.is_over = self._break_off(keeps)
            raise
        assert launched is not None
        self._under_way.append(launched.mark)
        mark = launched.mark
        under_way.is_over = lambda: mark.is_reached
        self._watch(t, launched, keeps, waits_for_others=True)
        return launched

    async def _await_room(self) -> None:
        """Wait until few operations are under way, so that no launch blocks on a full stream."""
        while self._under_way and self._under_way[0].is_reached:
            self._under_way.popleft()
        while len(self._under_way) >= MOST_UNDER_WAY:
            await Wait((Reached(self._under_way.popleft()),))

    async def _load_kernels(self, t: Channel, todo: Sequence[Job]) -> None:
        """Load the kernels of jobs, before all ranks exchange outlines, or else meet here."""
        transport = self._own_transport
        kernels = [kernel for job in todo for kernel in _kernels(job, transport)]
        await self._gpu.idle_calls.load(kernels)
        if transport.has_outlines:
            return
        new = {kernel.defines for kernel in kernels} - self._loaded_by_all
        if new:
            await gather_alike(b"loaded", t)
            self._loaded_by_all |= new

    async def put(
        self,
        t: Channel,
        job: Job,
        outline: bytes,
        issue: Issue,
        under_way: _UnderWay,
        *,
        end: Callable[[], R] | None = None,
    ) -> R | None:
        """Enqueue a job, then call end(), if any; return its result."""
        call, transport, device = self._gpu.launcher.call, self._own_transport, self._gpu.device
        steps = self._enqueue(job, await gather_alike(outline, t), issue)
        if not under_way.is_noted:  # not before: the other ranks may have to load kernels first
            under_way.is_noted = True
            self._gpu.idle_calls.note_under_way(under_way.ask)
        label = self._engine.pending.label_of(t.key) if self._engine.settings.nvtx else ""

        def step() -> Mark | R | None:
            with device.shown_as(label) if label else contextlib.nullcontext():
                mark = next(steps, None)
                return end() if mark is None and end is not None else mark

        while True:
            made: Mark | R | None = await call(step)
            if not isinstance(made, Mark):
                return made
            await Wait((Reached(made),))
            if not transport.meets_on_stream:
                await gather_alike(b"here", t)

    def _enqueue(self, job: Job, outlines: Sequence[bytes], issue: Issue) -> Iterator[Mark]:
        """Enqueue a job. Yield a mark where this rank has to wait until it is reached.

        Where the streams of the ranks do not meet, the ranks have to meet after each such wait.
        """
        transport, device, stream = self._own_transport, self._gpu.device, self._stream
        phases = transport.phases(job.work, outlines)
        issue.let_wait(stream)
        if job.buffer is not None:
            packing.pack(device, stream, job.packed, job.buffer)
        for kernel in _scaling(job.buffer, job.prescale):
            device.launch(stream, kernel)
        for number, _ in enumerate(phases, 1):
            if transport.meets_on_stream:
                transport.meet()
            if not transport.meets_on_stream or number % _PHASES_AHEAD == 0:
                yield self._own_marks.make()
        for kernel in _scaling(job.work.target, job.postscale):
            device.launch(stream, kernel)
        if job.buffer is not None:
            packing.unpack(device, stream, job.unpacked, job.buffer)

    def _end(self, issue: Issue, finish: Callable[[], R]) -> Launched[R]:
        with issue.on(self._stream):
            result = finish()
        return self.launched(issue, self._own_marks, self._stream, result)

    def launched(self, issue: Issue, marks: Marks, stream: int, result: R) -> Launched[R]:
        """Return the deferred result of what is on a stream now; see Launcher.call()."""
        done = Event(issue.memory, stream)
        mark = marks.make()
        return Launched(result, issue, done, mark, self._engine.state.require_unbroken)

    def follow(self, t: Channel, launched: Launched[R], keeps: Sequence[object]) -> Launched[R]:
        """Watch a stream that waits for no other rank until an operation is done; return that.

        `keeps` lives until then.
        """
        self._watch(t, launched, keeps, waits_for_others=False)
        return launched

    def _watch(
        self, t: Channel, launched: Launched[R], keeps: Sequence[object], *, waits_for_others: bool
    ) -> None:
        if waits_for_others:  # their deaths end the operation
            self.n_launched += 1
            members: tuple[int, ...] = self._members
            ticket = Ticket(None, self._base, self.n_launched)
        else:
            self._n_alone += 1
            members = (self._engine.job_rank,)
            ticket = Ticket(None, self._own, self._n_alone)
        group, mark = self._group(), launched.mark

        async def watch() -> None:
            kept = [keeps, launched, group]  # the group must outlive the work of its streams
            is_reached = False
            try:
                await Wait((Reached(mark),))
                is_reached = True
            finally:
                if not is_reached:
                    self._end_waits(lambda: mark.is_reached, kept)

        label = f"{self._engine.pending.label_of(t.key)} on the GPU"
        late = self._late if waits_for_others else tuple
        self._engine.extensions.follow_up(label, members, watch(), ticket, late=late)

    def _late(self) -> tuple[int, ...]:
        return tuple(self._members[rank] for rank in self._own_transport.late)

    def scratch(self, nbytes: int) -> Span:
        """See GpuTransport."""
        return self._own_transport.scratch(nbytes)

    def announce(self, why: str) -> None:
        """Warn, on the first rank and once per reason, that an operation uses host memory."""
        if self._rank == 0 and why not in self._announced:
            self._announced.add(why)
            _log.warning("an operation on a GPU goes through host memory: %s", why)

    def _has_entered(self, number: int) -> bool:
        return number <= self.n_launched

    def close(self, *, is_clean: bool) -> None:
        """Free everything; see GpuTransport."""
        self._engine.extensions.drop_entered(self._base)
        if self.transport is not None:
            self.transport.close(is_clean=is_clean)
            if is_clean:
                self._own_marks.close(self._gpu)

    @property
    def _gpu(self) -> GpuMemory:
        assert self._memory is not None
        return self._memory

    @property
    def _own_transport(self) -> GpuTransport:
        assert self.transport is not None
        return self.transport

    @property
    def _own_marks(self) -> Marks:
        assert self._marks is not None
        return self._marks

    @property
    def _stream(self) -> int:
        return self._own_transport.stream

    def _break_off(self, keeps: object) -> Callable[[], bool]:
        """End the stream's waits after an operation was enqueued only in part.

        Returns a function that returns True once the stream's work is done; `keeps` lives as long.
        """
        # Made after the call that enqueues this operation, which may still be under way.
        making = self._gpu.launcher.submit(self._own_marks.make)

        def is_over() -> bool:
            return making.is_over and making.result().is_reached

        self._end_waits(is_over, keeps)
        return is_over

    def _end_waits(self, is_over: Callable[[], bool], keeps: object) -> None:
        """End the stream's waits until is_over(); the results are then worthless."""
        if self.transport is not None:
            state, launcher = self._engine.state, self._gpu.launcher
            release = partial(_release, self.transport, launcher, state, is_over, [keeps])
            threading.Thread(target=release, name="ringcomm-gpu-release", daemon=True).start()


def _release(
    transport: GpuTransport,
    launcher: Launcher,
    state: EngineState,
    is_over: Callable[[], bool],
    keeps: list[object],
) -> None:
    """Release a transport until is_over(); then drop what `keeps` holds.

    Calls no function of CUDA: it may block until the waits have ended.
    """
    begin = time.monotonic()
    # A caller whose stream goes on must also find the error, so the error is set first.
    while not state.is_broken and time.monotonic() < begin + _ERROR_WITHIN_S:
        time.sleep(_RELEASE_EVERY_S)
    with contextlib.suppress(RingcommError):  # the GPU has failed: nothing waits any more
        while not is_over():  # the stream may come to another wait
            transport.release()
            launcher.require_sound()
            is_soon = time.monotonic() < begin + _RELEASE_OFTEN_FOR_S
            time.sleep(_RELEASE_EVERY_S if is_soon else _RELEASE_SELDOM_S)
    keeps.clear()


async def _prepared(
    team: GpuTeam, jobs: Jobs, launcher: Launcher
) -> tuple[Sequence[Job], list[bytes]]:
    """Return the jobs of an operation and this rank's outlines, without the launcher if possible.

    To hand something to that thread, and to wait for it, takes longer than all else here.
    """
    transport = team.transport
    assert transport is not None
    if not callable(jobs):
        known = [transport.known_outline(job.work) for job in jobs]
        outlines = [each for each in known if each is not None]
        if len(outlines) == len(jobs):
            return jobs, outlines

    def prepare() -> tuple[Sequence[Job], list[bytes]]:
        todo = jobs(team) if callable(jobs) else jobs
        return todo, [transport.outline(job.work) for job in todo]

    return await launcher.call(prepare)


def _kernels(job: Job, transport: GpuTransport) -> list[Kernel]:
    """Return all kernels of a job; the same on all ranks if those of the transport are."""
    kernels = [*transport.kernels(job.work)]
    if job.buffer is not None:
        kernels += packing.kernels(job.buffer.dtype.itemsize)
    if (job.prescale, job.postscale) != (1.0, 1.0):
        assert isinstance(job.work, Reduce)
        kernels.append(ScaleKernel(0, 0, job.work.dtype, 1.0))
    return kernels


def _scaling(x: Span | None, factor: float) -> list[ScaleKernel]:
    """Return the kernel that multiplies an array by a factor; none if nothing would change."""
    if x is None or factor == 1.0 or not x.count:
        return []
    return [ScaleKernel(x.address, x.count, x.dtype, factor)]
