"""The jobs of an operation: what other ranks must know of them, their kernels, and their launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ringcomm.arrays.base import Span
from ringcomm.collectives.message_patterns import consecutive
from ringcomm.engine.core.agreement import gather_alike
from ringcomm.gpu.device.base import Device
from ringcomm.gpu.executor.idle_calls import IdleCalls
from ringcomm.gpu.executor.launcher import CudaLauncher
from ringcomm.gpu.executor.streams import Issue, Mark, Marks
from ringcomm.gpu.kernels.base import Kernel
from ringcomm.gpu.kernels.pack import PACKED_ITEMSIZES, PackKernel
from ringcomm.gpu.kernels.scale import ScaleKernel
from ringcomm.gpu.transports.base import GpuTransport
from ringcomm.gpu.transports.works import GpuReduce, Job
from ringcomm.transport.channel import Channel

Jobs = Sequence[Job] | Callable[[GpuTransport], Sequence[Job]]  # a function may call CUDA
_PHASES_AHEAD = 16  # on a stream
_WORTH_A_KERNEL: Final = 3  # arrays


@dataclass(slots=True, eq=False)
class Prepared:
    """The jobs of an operation, ready to be enqueued.

    Attributes:
        jobs: all jobs.
        outlines: this rank's outline of each job.
        first: the outlines of the first job, by rank; None: the ranks have not exchanged them yet.
    """

    jobs: Sequence[Job]
    outlines: Sequence[bytes]
    first: Sequence[bytes] | None = None


async def prepare(transport: GpuTransport, jobs: Jobs, launcher: CudaLauncher) -> Prepared:
    """Return the jobs of an operation and this rank's outlines, without the launcher if possible.

    To hand something to that thread, and to wait for it, takes longer than all else here.
    """
    if not callable(jobs):
        known = transport.known_outline
        outlines = [found for job in jobs if (found := known(job.work)) is not None]
        if len(outlines) == len(jobs):
            return Prepared(jobs, outlines)

    def make() -> Prepared:
        todo = jobs(transport) if callable(jobs) else jobs
        return Prepared(todo, [transport.outline(job.work) for job in todo])

    return await launcher.call(make)


class LoadedKernels:
    def __init__(self) -> None:
        self._kinds: set[object] = set()  # kinds of jobs of which all kernels are loaded
        self._by_all: set[tuple[str, ...]] = set()  # kernels, if there are no outlines

    async def load(
        self, todo: Sequence[Job], transport: GpuTransport, idle_calls: IdleCalls, t: Channel
    ) -> None:
        """Load the kernels of jobs, before all ranks exchange outlines, or else meet here."""
        kinds = {_kind(job) for job in todo}
        if kinds <= self._kinds:
            if idle_calls.n_wanted:
                await idle_calls.load([])
            return
        kernels = [kernel for job in todo for kernel in _kernels(job, transport)]
        await idle_calls.load(kernels)
        if not transport.has_outlines:
            new = {kernel.defines for kernel in kernels} - self._by_all
            if new:
                await gather_alike(b"loaded", t)
                self._by_all |= new
        self._kinds |= kinds - {None}


def _kind(job: Job) -> object:
    """Return what _kernels() of a reduction depends on; None for other works."""
    work = job.work
    if not isinstance(work, GpuReduce):
        return None
    buffer, is_scaled = job.buffer, job.options.is_scaled
    packed = None if buffer is None else buffer.dtype.itemsize
    lengths = work.parts and {part.stop - part.start for part in work.parts}
    is_even = len(lengths) < 2  # is_native() of NCCL asks for it
    return work.dtype.name, work.op, work.to, work.is_deterministic, is_even, packed, is_scaled


def _kernels(job: Job, transport: GpuTransport) -> list[Kernel]:
    """Return all kernels of a job; the same on all ranks if those of the transport are."""
    kernels = [*transport.kernels(job.work)]
    if job.buffer is not None:
        kernels += _pack_kernels(job.buffer.dtype.itemsize)
    if job.options.is_scaled:
        assert isinstance(job.work, GpuReduce)
        kernels.append(ScaleKernel(0, 0, job.work.dtype, 1.0))
    return kernels


def enqueue(
    job: Job, outlines: Sequence[bytes], issue: Issue, transport: GpuTransport, marks: Marks
) -> Iterator[Mark]:
    """Enqueue a job. Yield a mark where this rank has to wait until it is reached.

    Where the streams of the ranks do not meet, the ranks have to meet after each such wait.
    """
    device, stream = issue.memory.device, transport.stream
    phases = transport.phases(job.work, outlines)
    issue.let_wait(stream)
    if job.buffer is not None:
        _pack(device, stream, job.packed, job.buffer)
        for kernel in _scaling(job.buffer, job.options.own_prescale):
            device.launch(stream, kernel)
    for number, _ in enumerate(phases, 1):
        if transport.meets_on_stream:
            transport.meet()
        if not transport.meets_on_stream or number % _PHASES_AHEAD == 0:
            yield marks.make()
    for kernel in _scaling(job.work.target, job.options.postscale):
        device.launch(stream, kernel)
    if job.buffer is not None:
        _unpack(device, stream, job.unpacked, job.buffer)


def _scaling(x: Span | None, factor: float) -> list[ScaleKernel]:
    if x is None or factor == 1.0 or not x.count:
        return []
    return [_scale_kernel(x.address, x.count, x.dtype, factor)]


# A kernel that is launched again has its parameters packed.
_scale_kernel = functools.lru_cache(maxsize=512)(ScaleKernel)


# --- packing: one kernel copies many arrays faster than as many copies ----------------------------
def _pack(device: Device, stream: int, arrays: Sequence[Span], buffer: Span) -> None:
    """Copy arrays to a buffer of their dtype, one behind the other."""
    _copy(device, stream, arrays, buffer, unpacks=False)


def _unpack(device: Device, stream: int, arrays: Sequence[Span], buffer: Span) -> None:
    _copy(device, stream, arrays, buffer, unpacks=True)


def _pack_kernels(itemsize: int) -> list[PackKernel]:
    both = (False, True) if itemsize in PACKED_ITEMSIZES else ()
    return [PackKernel((), 0, itemsize, unpacks, 0, 0) for unpacks in both]


def _copy(
    device: Device, stream: int, arrays: Sequence[Span], buffer: Span, *, unpacks: bool
) -> None:
    counts = [array.count for array in arrays]
    itemsize = buffer.dtype.itemsize
    if len(arrays) >= _WORTH_A_KERNEL and itemsize in PACKED_ITEMSIZES:
        addresses = [array.address for array in arrays]
        launches = device.layouts.kernels(
            addresses, counts, buffer.address, itemsize, unpacks=unpacks
        )
        if launches is not None:
            for kernel in launches:
                device.launch(stream, kernel)
            return
    for array, part in zip(arrays, consecutive(counts), strict=True):
        piece = buffer[part]
        target, source = (array, piece) if unpacks else (piece, array)
        if source.nbytes:
            device.copy(stream, target.address, source.address, source.nbytes)
