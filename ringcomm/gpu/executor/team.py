"""The ranks of a group on their GPUs: their transport, and the order of their launches.

The ranks agree on an operation as on any other. Then the group's first rank gives the operation its
place in the order of launches: streams that wait for each other need the same order on all ranks.
In this order, each rank enqueues its part on its stream, and returns. The caller does not wait for
the result, but the caller's stream does. A task watches the stream, see WatchedStream. The task has
the same deadline as any operation, and ends the stream's waits if a rank dies.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from ringcomm._core import Places
from ringcomm.arrays import DTYPES, Flat
from ringcomm.collectives.algorithms import tree
from ringcomm.engine.core.agreement import gather_alike
from ringcomm.engine.core.ledger import NO_GROUP, base_of
from ringcomm.engine.core.usable_or_broken import EngineState
from ringcomm.errors import RingcommError
from ringcomm.gpu.executor.jobs import (
    Jobs,
    LoadedKernels,
    Prepared,
    enqueue,
    prepare,
)
from ringcomm.gpu.executor.launcher import CudaLauncher
from ringcomm.gpu.executor.streams import (
    Event,
    GpuMemory,
    Issue,
    Launched,
    Mark,
    Marks,
    Reached,
)
from ringcomm.gpu.executor.transport_setup import set_up_transport
from ringcomm.gpu.executor.watched_stream import WatchedStream
from ringcomm.gpu.transports.base import GpuTransport
from ringcomm.gpu.transports.ipc_commands import Outline
from ringcomm.gpu.transports.nccl_base import NcclBinding
from ringcomm.gpu.transports.transport_choice import GpuChoice
from ringcomm.gpu.transports.works import Job
from ringcomm.transport.channel import Channel, Until, Wait

if TYPE_CHECKING:
    from ringcomm.engine.core.group import Group


_PLACE_NBYTES = 8
_log = logging.getLogger("ringcomm")
_RELEASE_EVERY_S, _RELEASE_OFTEN_FOR_S, _RELEASE_SELDOM_S = 0.005, 10.0, 0.2
# A stream with about 1000 entries blocks a thread that adds more; a phase adds 4 per rank, and most
# operations have 3 phases or fewer.
MOST_UNDER_WAY: Final = 16
_ERROR_WITHIN_S = 1.0
R = TypeVar("R")
_NOTHING: Final = bytes(Outline.NBYTES + 1)  # from a rank that has prepared nothing


class LaunchOrder:
    """The places of the operations of one team, on one rank."""

    def __init__(self) -> None:
        self._places = Places()  # on the first rank: those that it has given
        self._turn = 0  # the place of the operation that may launch

    async def place(self, t: Channel) -> int:
        """Return the place of an operation; collective."""
        number = np.array([self._next(t)], np.int64)
        await tree.broadcast_(Flat(number.view(np.uint8), DTYPES["int64"]), 0, t)
        return int(number[0])

    async def place_and_bytes(self, t: Channel, mine: bytes) -> tuple[int, list[bytes]]:
        """Return the place, and the bytes of every rank, in one round.

        In shared memory that is also the round in which the ranks agree on the operation, if they
        have not yet: a place is given only to what all ranks have agreed on.

        Args:
            t: the operation's channel.
            mine: this rank's bytes, equally many on all ranks.

        Raises:
            Disagreement: see Channel.meet().
        """
        if t.meeting is not None:
            return await self._place_and_bytes_in_node(t, mine)
        place = self._next(t).to_bytes(_PLACE_NBYTES, "little")
        of_all = await gather_alike(place + mine, t)
        return int.from_bytes(of_all[0][:_PLACE_NBYTES], "little"), [
            each[_PLACE_NBYTES:] for each in of_all
        ]

    async def _place_and_bytes_in_node(self, t: Channel, mine: bytes) -> tuple[int, list[bytes]]:
        n = len(mine)
        of_all = np.empty((t.size, n), np.uint8)
        of_all[t.rank] = np.frombuffer(mine, np.uint8)
        pulls = [(rank, 0, of_all[rank]) for rank in range(t.size) if rank != t.rank]
        place = await t.place_and_bytes(self._places, of_all[t.rank], pulls)
        whole = of_all.tobytes()
        return place, [whole[rank * n : (rank + 1) * n] for rank in range(t.size)]

    def _next(self, t: Channel) -> int:
        return 0 if t.rank else self._places.take()

    async def take_turn(self, place: int) -> None:
        if self._turn != place:
            await Wait((Until(lambda: self._turn == place),))

    def end_turn(self) -> None:
        self._turn += 1


class GpuTeam:
    """The team of one group, on one rank.

    Args:
        provider: function that returns the binding of NCCL.
        group: the group whose team this is.
        group_id: the group's number.

    Attributes:
        choice: the choice of the transport; None before the first operation.
        transport: the transport; None: the CPU's collectives are used, through host memory.
        order: the turns of the operations.
    """

    def __init__(self, provider: Callable[[], NcclBinding], group: Group, group_id: int) -> None:
        self._provider = provider
        self._engine = group.engine
        self._group = weakref.ref(group)
        self._members = group.ranks
        self._rank = group.index
        self._base = base_of(group_id, "on the GPU")
        self._under_way = WatchedStream(
            self._engine,
            group.ranks,
            self._base,
            self._late,
            self._end_waits,
            is_released=lambda: self._own_transport.is_released,
        )
        rank = self._engine.job_rank  # of what waits for no other rank
        own = base_of(NO_GROUP, f"rank {rank} on the GPU, {group_id}")
        self._alone = WatchedStream(self._engine, (rank,), own, tuple, self._end_waits)
        self._is_enqueueing = False
        self._given_up: list[Callable[[], bool]] = []  # functions that say whether it is over
        self.order = LaunchOrder()
        self._marks: Marks | None = None
        self._memory: GpuMemory | None = None
        self.choice: GpuChoice | None = None
        self.transport: GpuTransport | None = None
        self._is_one_host = len(set(group.ranks.nodes)) == 1  # so that ipc is possible
        self._announced: set[str] = set()
        self._loaded = LoadedKernels()
        has_entered = lambda number: number <= self._under_way.n_added  # noqa: E731
        self._engine.extensions.add_entered(self._base, has_entered)

    # --- order ------------------------------------------------------------------------------------
    async def take_turn(self, t: Channel, issue: Issue, jobs: Jobs | None) -> Prepared | None:
        """Return once it is this operation's turn, and the transport is set up.

        If this returns, the caller has to call order.end_turn().

        Args:
            t: the operation's channel.
            issue: the operation's Issue.
            jobs: what to prepare for carry_out(), see there; None: nothing.

        Returns:
            What was prepared, if all ranks have already exchanged what they need to know of it.

        Raises:
            ConfigError: on all ranks, if RINGCOMM_GPU_TRANSPORT names an unusable transport.
            RingcommError: the arrays are on another GPU than those of earlier operations.
        """
        prepared = failure = None
        if self._is_one_host:
            place, prepared, failure = await self._place_and_outlines(t, issue, jobs)
        else:
            place = await self.order.place(t)
        await self.order.take_turn(place)
        try:
            if failure is not None:
                raise failure
            if self._memory is None:
                made = await set_up_transport(self._provider, self._engine, issue.memory, t)
                (self.choice, self.transport), self._memory = made, issue.memory
                issue.memory.idle_calls.add_stream(self._is_idle)
                if self.transport is not None:
                    make = partial(Marks, issue.memory, self.transport.stream)
                    self._marks = await issue.memory.idle_calls.call(make)
            elif prepared is None:  # else that was looked at when it was prepared
                self._require_same_gpu(t, issue)
        except BaseException:
            self.order.end_turn()
            raise
        return prepared

    def _require_same_gpu(self, t: Channel, issue: Issue) -> None:
        if issue.memory is self._memory:
            return
        now, before = issue.memory.device.index, self._gpu.device.index
        raise RingcommError(
            f"{self._engine.pending.label_of(t.key)}: this rank's arrays are on GPU {now}, "
            f"its earlier arrays were on GPU {before}. A rank uses one GPU per group: call "
            "torch.cuda.set_device() or cupy.cuda.Device().use() once, before the first array"
        )

    async def _place_and_outlines(
        self, t: Channel, issue: Issue, jobs: Jobs | None
    ) -> tuple[int, Prepared | None, Exception | None]:
        """Return the place, and the jobs if all ranks know the outlines of the first one.

        The ranks say all that in one round, which is always of the same form: this rank may not
        have a transport yet when others have. In shared memory they agree in it, too. The last
        item is why this rank could not prepare: the operation has its place.
        """
        prepared = failure = None
        transport = self.transport
        if jobs is not None and transport is not None and transport.has_outlines:
            try:
                self._require_same_gpu(t, issue)
                prepared = await prepare(transport, jobs, issue.memory.launcher)
                await self._loaded.load(prepared.jobs, transport, issue.memory.idle_calls, t)
            except Exception as error:  # noqa: BLE001 - raised in its turn, if the ranks agree
                failure = error
        known = _NOTHING if prepared is None else b"\1" + prepared.outlines[0]
        place, of_all = await self.order.place_and_bytes(t, known)
        if prepared is not None:
            outlines = [each[1:] for each in of_all if each[0]]
            if len(outlines) == len(of_all):
                prepared.first = outlines
                return place, prepared, failure
        return place, None, failure

    # --- launches ---------------------------------------------------------------------------------
    async def carry_out(
        self,
        t: Channel,
        issue: Issue,
        jobs: Jobs,
        finish: Callable[[], R],
        keeps: Sequence[object],
        *,
        enqueues: bool,
        prepared: Prepared | None,
    ) -> Launched[R]:
        """Enqueue an operation in its turn, and watch the stream until the operation is done.

        Args:
            t: the operation's channel.
            issue: the operation's Issue.
            jobs: what to enqueue, or a function that returns it, and may call CUDA.
            finish: function that is called last, while the team's stream is the current stream;
                returns the result.
            keeps: objects that live until the stream's work is done.
            enqueues: finish() enqueues work; False: it enqueues nothing.
            prepared: from take_turn().
        """
        await self._await_room()
        if prepared is None:
            transport = self._own_transport
            prepared = await prepare(transport, jobs, issue.memory.launcher)
            await self._loaded.load(prepared.jobs, transport, issue.memory.idle_calls, t)
        todo, first = prepared.jobs, prepared.first
        keeps = (*todo, *keeps)
        launched = None
        try:
            for number, (job, outline) in enumerate(zip(todo, prepared.outlines, strict=True), 1):
                end = (
                    partial(self._end, issue, finish, enqueues=enqueues)
                    if number == len(todo)
                    else None
                )
                outlines, first = first or await gather_alike(outline, t), None
                launched = await self.put(t, job, outlines, issue, end=end)
            assert launched is not None
            self._watch(self._under_way, t, launched, keeps)
        except BaseException:  # a death, or an error of CUDA: nothing watches the stream so far
            self._break_off(keeps)
            raise
        finally:
            self._is_enqueueing = False
        return launched

    async def _await_room(self) -> None:
        """Wait until few operations are under way, so that no launch blocks on a full stream."""
        while (mark := self._under_way.earliest(MOST_UNDER_WAY)) is not None:
            await Wait((Reached(mark),))

    def _is_idle(self) -> bool:
        if self._is_enqueueing or self._under_way.earliest() is not None:
            return False
        return all(is_over() for is_over in self._given_up)

    async def put(
        self,
        t: Channel,
        job: Job,
        outlines: Sequence[bytes],
        issue: Issue,
        *,
        end: Callable[[], R] | None = None,
    ) -> R | None:
        """Enqueue a job, then call end(), if any; return its result."""
        memory, transport = issue.memory, self._own_transport
        steps = enqueue(job, outlines, issue, transport, self._own_marks)
        self._is_enqueueing = True  # not before: the other ranks may have to load kernels first
        label = self._engine.pending.label_of(t.key) if self._engine.settings.nvtx else ""

        def step() -> Mark | R | None:
            mark = next(steps, None)
            return end() if mark is None and end is not None else mark

        def shown_step() -> Mark | R | None:
            with memory.device.shown_as(label):
                return step()

        while True:
            made: Mark | R | None = await memory.launcher.call(shown_step if label else step)
            if not isinstance(made, Mark):
                return made
            await Wait((Reached(made),))
            if not transport.meets_on_stream:
                await gather_alike(b"here", t)

    def _end(self, issue: Issue, finish: Callable[[], R], *, enqueues: bool) -> Launched[R]:
        stream = self._own_transport.stream
        if enqueues:
            with issue.on(stream):
                result = finish()
        else:  # to enter a stream of torch, and to leave it, takes longer than a launch
            result = finish()
        return self.launched(issue, self._own_marks, stream, result)

    def launched(self, issue: Issue, marks: Marks, stream: int, result: R) -> Launched[R]:
        done = Event(issue.memory, stream)
        mark = marks.make()
        return Launched(result, issue, done, mark, self._engine.state.require_unbroken)

    def follow(self, t: Channel, launched: Launched[R], keeps: Sequence[object]) -> Launched[R]:
        """Watch a stream that waits for no other rank until an operation is done; return that.

        `keeps` lives until then.
        """
        self._watch(self._alone, t, launched, keeps)
        return launched

    def _watch(
        self, stream: WatchedStream, t: Channel, launched: Launched[R], keeps: Sequence[object]
    ) -> None:
        label = f"{self._engine.pending.label_of(t.key)} on the GPU"
        # The group must outlive the work of its streams.
        stream.add(label, launched.mark, (keeps, launched, self._group()))

    def _late(self) -> tuple[int, ...]:
        return tuple(self._members[rank] for rank in self._own_transport.late)

    def announce(self, why: str) -> None:
        if self._rank == 0 and why not in self._announced:
            self._announced.add(why)
            _log.warning("an operation on a GPU goes through host memory: %s", why)

    def close(self, *, is_clean: bool) -> None:
        self._engine.extensions.drop_entered(self._base)
        if self._memory is not None:
            self._memory.idle_calls.remove_stream(self._is_idle)
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

    def _break_off(self, keeps: object) -> None:
        """End the stream's waits after an operation was enqueued only in part.

        `keeps` lives until the stream's work is done.
        """
        # Made after the call that enqueues this operation, which may still be under way.
        making = self._gpu.launcher.submit(self._own_marks.make)

        def is_over() -> bool:
            return making.is_over and making.result().is_reached

        self._end_waits(is_over, keeps)

    def _end_waits(self, is_over: Callable[[], bool], keeps: object) -> None:
        """End the stream's waits until is_over(); the results are then worthless."""
        self._given_up.append(is_over)
        if self.transport is not None:
            state, launcher = self._engine.state, self._gpu.launcher
            release = partial(_release, self.transport, launcher, state, is_over, [keeps])
            threading.Thread(target=release, name="ringcomm-gpu-release", daemon=True).start()


def _release(
    transport: GpuTransport,
    launcher: CudaLauncher,
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
