"""A GPU that is not there: streams, events and flags whose work a random scheduler carries out.

Its memory is files that any process maps, so that ranks may be threads or processes. What a stream
is given is done later, in the order of the stream, and in any order that events and flags allow
among streams: what is not ordered goes wrong sooner or later, by a seed that can be repeated. Its
kernels are the CPU's, which tests/gpu/test_kernels.py shows to be those of the GPU bit for bit.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import mmap
import os
import random
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import gpu_emulation
import numpy as np
from random_programs import Library

from ringcomm import _core
from ringcomm.arrays import DTYPES, Span, add_device_adapter
from ringcomm.errors import ConfigError, RingcommError
from ringcomm.gpu.device.ipc_pool import Regions
from ringcomm.gpu.device.pack_tables import Layouts
from ringcomm.gpu.executor.engine_gpus import Drivers
from ringcomm.gpu.kernels.pack import PackKernel
from ringcomm.gpu.kernels.reduce import ReduceKernel

_IDLE_S, _LONGEST_IDLE_S = 1e-4, 2e-3
_LOOK_S = 0.05  # how often who waits for a stream looks whether the GPU has failed
HOST = -1  # the stream of arrays that the host computes with: it waits, and nothing is later
_serial = itertools.count(3)  # 1 and 2 are streams of CUDA's that mean something else
_emulating = threading.Lock()


def bytes_at(address, nbytes):
    """Return the bytes there, which can be written."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


class _File:
    """Memory that other processes can map."""

    def __init__(self, path, nbytes=None):
        flags = os.O_RDWR | (0 if nbytes is None else os.O_CREAT | os.O_EXCL)
        fd = os.open(path, flags, 0o600)
        try:
            if nbytes is not None:
                os.ftruncate(fd, max(nbytes, 1))
            self.path = path
            self.map = mmap.mmap(fd, 0)
        finally:
            os.close(fd)
        self.nbytes = len(self.map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))


def poll(is_so):
    """Return once is_so(): others bring it about, and do not tell. Looks less and less often."""
    idle_s = _IDLE_S
    while not is_so():
        time.sleep(idle_s)
        idle_s = min(2 * idle_s, _LONGEST_IDLE_S)


class SimulatedGpu:
    """Device of one rank.

    Args:
        folder: of the files, alike on all ranks.
        seed: of the scheduler.
        uuid: ranks of one uuid share a GPU.
        has_stream_values: see Device.
        slow: how likely it is that a stream which could go on does not, at each turn.

    Attributes:
        failure: what a stream has raised; None: nothing.
        n_done: entries of streams that have been carried out.
        longest: the most entries that a stream has had.
        n_reductions: launches of the kernel that reduces.
        n_packs: of the one that packs.
        n_late_loads: kernels that a launch had to load.
        strays: streams that were left for GPU 0, as its thread used no other GPU.
        depth: entries that a stream takes before it blocks.
        is_loading: a function is being loaded, or has been.
        context: the lock of the context, which each call of CUDA takes.
        registered: addresses of host memory that it reaches.
        ranges: (label, whether work was enqueued) of what a profiler would show.
    """

    all: ClassVar = {}

    def __init__(
        self,
        folder,
        seed=0,
        *,
        uuid="gpu-0",
        reaches=None,
        can_export=True,
        has_stream_values=True,
        slow=0.3,
    ):
        self.index = next(_serial)  # of one process; ranks may be its threads
        self.all[self.index] = self
        self.uuid, self.can_export, self.has_stream_values = uuid, can_export, has_stream_values
        self.reaches = (uuid,) if reaches is None else tuple(reaches)
        self.regions = Regions(self)
        self._folder = Path(folder)
        self._random = random.Random(seed)
        self._slow = slow
        self._lock = threading.Condition(threading.RLock())
        self._streams = {0: deque()}
        self._recorded, self._reached = {}, {}
        self._mapped, self._files, self.pool = {}, [], {}
        self.registered, self._freed = set(), set()
        self._is_closed = False
        self._is_frozen = False
        self.failure = None
        self.set_room(1 << 20)
        self.n_done = self.longest = 0
        self.n_reductions = self.n_packs = 0
        self.n_late_loads = self.strays = 0
        self.depth = 1000
        self.context = threading.RLock()
        self.is_loading = threading.Event()
        self._captures, self._loaded = {}, set()
        self.ranges, self._n_given = [], 0
        self._thread = threading.Thread(target=self._run, name="simulated-gpu", daemon=True)
        self._thread.start()

    # --- Device -----------------------------------------------------------------------------------
    @contextlib.contextmanager
    def active(self):
        with on_gpu(self):
            yield

    @contextlib.contextmanager
    def _call(self, *, is_unsafe=False):
        """Take the context's lock, as each call of CUDA does; others may hold it long."""
        with self.context:
            if is_unsafe and self._captures and not _here.leaves_captures_alone:
                self._captures = dict.fromkeys(self._captures, False)
            yield

    def new_stream(self):
        handle = next(_serial)
        with self._call(), self._lock:
            self._streams[handle] = deque()
        return handle

    def new_event(self):
        handle = next(_serial)
        with self._call(), self._lock:
            self._recorded[handle] = self._reached[handle] = 0
        return handle

    def free_stream(self, stream):
        self.regions.forget_stream(stream)
        with self._lock:
            if not self._is_closed:  # a team of a group that is over ends in a thread, maybe later
                self._freed.add(stream)  # as CUDA does, once it is through
                self._drop_freed()

    def _drop_freed(self):
        for stream in [each for each in self._freed if not self._streams[each]]:
            self._freed.remove(stream)
            del self._streams[stream]

    def record(self, event, stream):
        with self._lock:
            self._recorded[event] += 1
            turn = self._recorded[event]
        self.enqueue(stream, lambda: self._note(event, turn))

    def _note(self, event, turn):
        self._reached[event] = max(turn, self._reached[event])

    def await_event(self, stream, event):
        turn = self._recorded[event]
        self.enqueue(stream, lambda: None, lambda: self._reached[event] >= turn)

    def query(self, event):
        """Ask for an event, as ringcomm never does: that ends captures by other threads."""
        with self._call(is_unsafe=True):
            return self._is_reached(event)

    def _require_no_failure(self):
        if self.failure is not None:
            raise RingcommError(f"the simulated GPU failed: {self.failure!r}") from self.failure

    def _is_reached(self, event):
        self._require_no_failure()
        return self._is_closed or self._reached[event] >= self._recorded[event]

    def require_sound(self, stream):
        with self._call(is_unsafe=True):
            self._require_no_failure()
            if self._is_closed:
                raise RingcommError("the simulated GPU is closed")

    def is_capturing(self, stream):
        return stream in self._captures

    def leave_captures_alone(self):
        _here.leaves_captures_alone = True

    def copy(self, stream, target, source, nbytes):
        self.enqueue(stream, lambda: ctypes.memmove(target, source, nbytes))

    @contextlib.contextmanager
    def shown_as(self, label):
        before = self._n_given
        yield
        self.ranges.append((label, self._n_given > before))

    def load(self, kernel):
        self.load_function(kernel.defines)

    def has_loaded(self, kernel):
        return kernel.defines in self._loaded

    def load_function(self, name):
        """Load a function, as a library does with the first launch: once all streams are idle."""
        with self._call(is_unsafe=True):
            if name in self._loaded:
                return
            self.is_loading.set()
            # The scheduler, and others, bring it about.
            poll(lambda: self._is_closed or not any(self._streams.values()))
            self._loaded.add(name)

    def launch(self, stream, kernel):
        with self._call():
            self.n_late_loads += kernel.defines not in self._loaded
            self.load_function(kernel.defines)
            self._launch(stream, kernel)

    def _launch(self, stream, kernel):
        self.n_reductions += isinstance(kernel, ReduceKernel)
        self.n_packs += isinstance(kernel, PackKernel)

        def work():
            with _emulating:
                gpu_emulation.launch(kernel)

        is_reduction = isinstance(kernel, ReduceKernel)
        self.enqueue(stream, (lambda: _reduce(kernel)) if is_reduction else work)

    def set_room(self, nbytes):
        """Give tables for packing this much room."""
        self._room = np.empty(nbytes, np.uint8)
        self.layouts = Layouts(self._room, self._room.ctypes.data)

    def allocate(self, nbytes):
        with self._call(is_unsafe=True):
            return self._allocate(nbytes)

    def _allocate(self, nbytes):
        file = _File(self._folder / f"{os.getpid()}-{next(_serial)}", nbytes)
        self._files.append(file)  # what is used too late finds other values, and no fault
        return file

    def pooled(self, nbytes):
        """Return memory; on stream 0, as pools do, that of an array of it that was dropped."""
        kept = self.pool.get(nbytes) if current_stream() == 0 else None
        return kept.pop() if kept else self._allocate(nbytes)

    def export(self, memory):
        assert self.can_export
        return os.fsencode(memory.path.name)

    def map(self, exported):
        file = _File(self._folder / os.fsdecode(exported))
        self._mapped[file.address] = file
        return file.address

    def unmap(self, address):
        del self._mapped[address]

    def register(self, memory):
        assert memory.ctypes.data % 4096 == 0, "only whole pages can be registered"
        with self._call(is_unsafe=True):
            self.registered.add(memory.ctypes.data)
        return memory.ctypes.data

    def unregister(self, memory):
        self.registered.remove(memory.ctypes.data)

    def write_value(self, stream, address, value):
        flag = ctypes.c_uint32.from_address(address)
        self.enqueue(stream, lambda: setattr(flag, "value", value))

    def await_value(self, stream, address, value):
        assert self.has_stream_values
        flag = ctypes.c_uint32.from_address(address)
        is_there = lambda: (flag.value - value) % (1 << 32) < 1 << 31  # noqa: E731
        self.enqueue(stream, lambda: None, is_there)

    def write_and_await(self, stream, own, others, value):
        self.write_value(stream, own, value)
        for address in others:
            self.await_value(stream, address, value)

    def close(self):
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._lock.notify_all()
        self._thread.join(120)
        self.all.pop(self.index, None)  # its files are open as long as anybody knows of them
        for kept in (self._files, self._mapped, self.pool, self._streams):
            kept.clear()

    # --- what tests look at, and the fake NCCL uses -----------------------------------------------
    def enqueue(self, stream, action, is_ready=lambda: True):
        """Put something on a stream by a call, which blocks as long as the stream is full."""
        with self._call():
            if self._captures.get(stream) is not None:
                self._captures[stream] = False  # it awaits, or writes, what is outside of the graph
            # The scheduler makes room.
            poll(lambda: self._is_closed or len(self._streams.get(stream, ())) < self.depth)
            self.give(stream, action, is_ready)

    def begin_capture(self, stream):
        """Make a stream capture a graph; end_capture() returns True if nothing has disturbed it."""
        self._captures[stream] = True

    def end_capture(self, stream):
        return self._captures.pop(stream)

    def give(self, stream, action, is_ready=lambda: True):
        """Put something on a stream; on HOST it happens now."""
        if stream == HOST:
            poll(is_ready)  # the scheduler brings it about
            action()
            return
        with self._lock:
            self._n_given += 1
            if not self._is_closed:
                # Who synchronizes the GPU may look at a stream that is freed meanwhile.
                queue = self._streams.get(stream, self._streams[0])
                queue.append((is_ready, action))
                self.longest = max(self.longest, len(queue))
                self._lock.notify_all()

    def synchronize(self):
        """Wait until all are, as torch.cuda.synchronize() does: no capture survives that."""
        self._captures = dict.fromkeys(self._captures, False)
        for stream in tuple(self._streams):
            self.finish(stream)

    def finish(self, stream=0, timeout_s=120):
        """Wait until a stream is through."""
        if stream in self._captures:
            raise RingcommError(f"stream {stream} captures a graph")
        is_through = threading.Event()
        self.give(stream, is_through.set)
        deadline = time.monotonic() + timeout_s
        while not (is_through.wait(_LOOK_S) or self._is_closed or self.failure is not None):
            assert time.monotonic() < deadline, f"stream {stream} is stuck: {self.describe()}"
        self._require_no_failure()

    def freeze(self):
        """Carry nothing out any more, until thaw()."""
        self._is_frozen = True

    def thaw(self):
        self._is_frozen = False

    def describe(self):
        return {stream: len(queue) for stream, queue in self._streams.items() if queue}

    def _run(self):
        idle_s = _IDLE_S
        while True:
            with self._lock:
                if self._is_closed or self.failure is not None:
                    return  # after an error no stream goes on
                busy = [queue for queue in self._streams.values() if queue]
                if not busy:
                    self._lock.wait()
                    continue
                self._random.shuffle(busy)
                queue = next((q for q in busy if q[0][0]()), None)
                may_go_on = not self._is_frozen and self._random.random() >= self._slow
                entry = queue[0] if queue and may_go_on else None
            if entry is None:
                time.sleep(idle_s)  # another process may write a flag
                idle_s = _IDLE_S if queue else min(2 * idle_s, _LONGEST_IDLE_S)
                continue
            idle_s = _IDLE_S
            try:
                entry[1]()
            except BaseException as error:
                self.failure = error
                return
            with self._lock:
                queue.popleft()
                self._drop_freed()
            self.n_done += 1


def _reduce(what):
    """Carry out a ReduceKernel, faster than g++ compiles it."""
    nbytes = what.count * what.dtype.itemsize
    sources = [bytes_at(address, nbytes).copy() for address in what.sources]
    total = sources[0]
    if what.result is not None:
        total = _reduce_to(what.result, sources, what)
        nbytes = total.nbytes
    elif what.dtype.is_16bit_float:
        out = np.empty_like(total)
        code = what.dtype.kernel, what.op.kernel, what.divisor
        _core.combine_at_once(out, sources, *code)
        total = out
    else:
        for source in sources[1:]:
            _core.combine(total, source, what.dtype.kernel, what.op.kernel)
        if what.divisor != 1:
            _core.divide(total, what.divisor, what.dtype.kernel)
    for target in what.targets:
        bytes_at(target, nbytes)[:] = total


def _reduce_to(dtype, sources, what):
    """Return the result of a ReduceKernel in another dtype than its sources'."""
    float32 = DTYPES["float32"]
    wide = []
    for source in sources:
        wide.append(np.empty(4 * what.count, np.uint8))
        if dtype is float32:
            _core.convert(wide[-1], source, float32.kernel, what.dtype.kernel)
        else:
            wide[-1][:] = source
    for source in wide[1:]:
        _core.combine(wide[0], source, float32.kernel, what.op.kernel)
    if what.divisor != 1:
        _core.divide(wide[0], what.divisor, float32.kernel)
    if dtype is float32:
        return wide[0]
    out = np.empty(2 * what.count, np.uint8)
    _core.convert(out, wide[0], dtype.kernel, float32.kernel)
    return out


# --- arrays ---------------------------------------------------------------------------------------
class GpuArray:
    """An array on a simulated GPU; its memory is another's as soon as it is dropped."""

    def __init__(self, gpu, dtype, shape, memory=None, offset=0):
        self.gpu, self.dtype, self.shape = gpu, dtype, tuple(shape)
        self.count = math.prod(self.shape)
        self.nbytes = self.count * dtype.itemsize
        self.owns = memory is None
        self.is_pooled = self.owns and current_stream() == 0
        self.memory = gpu.pooled(self.nbytes) if memory is None else memory
        self.address = self.memory.address + offset

    def __getitem__(self, rows):
        start, stop, _ = rows.indices(self.shape[0])
        width = math.prod(self.shape[1:]) * self.dtype.itemsize
        offset = self.address - self.memory.address + start * width
        part = GpuArray(self.gpu, self.dtype, (stop - start, *self.shape[1:]), self.memory, offset)
        part.parent = self
        return part

    def fill_later(self, values, stream=None):
        """Let the current stream write values; until then it holds something else."""
        raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8).copy()
        assert raw.nbytes == self.nbytes
        at, nbytes = self.address, self.nbytes
        stream = current_stream() if stream is None else stream
        self.gpu.give(stream, lambda: bytes_at(at, nbytes).__setitem__(slice(None), raw))
        return self

    def fill(self, value):
        return self.fill_later(np.full(self.shape, value, _numpy_dtype(self.dtype)))

    def get(self):
        """Return the values, as the current stream finds them."""
        out = np.empty(self.nbytes, np.uint8)
        at, nbytes = self.address, self.nbytes
        stream = current_stream()
        self.gpu.give(stream, lambda: out.__setitem__(slice(None), bytes_at(at, nbytes)))
        self.gpu.finish(stream)
        return out.view(_numpy_dtype(self.dtype)).reshape(self.shape)

    def __del__(self):
        if not self.__dict__.get("owns") or not self.nbytes:
            return
        at, nbytes = self.address, self.nbytes
        self.gpu.give(0, lambda: bytes_at(at, nbytes).fill(0xA5))
        if self.is_pooled:
            self.gpu.pool.setdefault(nbytes, []).append(self.memory)


def _numpy_dtype(dtype):
    if dtype.name == "bfloat16":
        import ml_dtypes

        return ml_dtypes.bfloat16
    return np.dtype(dtype.name)


class _Here(threading.local):
    gpu = None
    streams = (0,)
    leaves_captures_alone = False


_here = _Here()


def use(gpu):
    """Let this be the GPU of this thread."""
    _here.gpu = gpu


def current_gpu():
    return _here.gpu


def current_stream():
    return _here.streams[-1]


@contextlib.contextmanager
def on_stream(stream, gpu=None):
    """Let this be the current stream, and the GPU, of this thread."""
    before = _here.streams, _here.gpu
    _here.streams = (*_here.streams, stream)
    _here.gpu = gpu or _here.gpu
    try:
        yield
    finally:
        _here.streams, _here.gpu = before
        if _here.gpu is None and gpu is not None:
            gpu.strays += 1  # cudaSetDevice(0) makes a context there


@contextlib.contextmanager
def on_gpu(gpu):
    """Make this the GPU of this thread for a while, as a context that is pushed."""
    before, _here.gpu = _here.gpu, gpu
    try:
        yield
    finally:
        _here.gpu = before


def array(values):
    """Return an array on this thread's GPU, which will have these values."""
    values = np.asarray(values)
    made = GpuArray(_here.gpu, DTYPES[values.dtype.name], values.shape)
    return made.fill_later(values)


@dataclass(frozen=True)
class _Borrowed:
    """Memory that has an owner."""

    span: Span

    @property
    def address(self):
        return self.span.address


class Simulated(Library):
    """Arrays on simulated GPUs, for random programs."""

    def of(self, x):
        return array(x)

    def read(self, x):
        return x.get()


class _Adapter:
    kind = "simulated"
    place = "cuda"

    def dtype(self, x):
        return x.dtype

    def shape(self, x):
        return x.shape

    def is_contiguous(self, x):
        return True

    def copy(self, x):
        made = self.empty(x, x.shape)
        self.assign(made, x)
        return made

    def empty(self, like, shape):
        return GpuArray(like.gpu, like.dtype, shape)

    def make(self, dtype, shape):
        return GpuArray(_here.gpu, dtype, shape)

    def assign(self, target, source):
        keep = target, source
        target.gpu.give(
            current_stream(),
            lambda: ctypes.memmove(keep[0].address, keep[1].address, source.nbytes),
        )

    def require_writable(self, x):
        pass

    def written(self, x):
        pass

    def span(self, x):
        return Span(x.address, x.count, x.dtype, x)

    def device(self, x):
        return x.gpu.index

    def wrap(self, memory, shape, device):
        made = GpuArray(SimulatedGpu.all[device], memory.dtype, shape, _Borrowed(memory))
        made.owner = memory.owner
        return made

    def current_device(self):
        return 0 if _here.gpu is None else _here.gpu.index

    def stream(self, device):
        return current_stream()

    def stream_owner(self, device):
        return None

    def on_stream(self, device, stream):
        return on_stream(stream, SimulatedGpu.all[device])


add_device_adapter(lambda x: type(x) is GpuArray, _Adapter())


# --- how a rank comes to it -----------------------------------------------------------------------
def drivers(nccl=None):
    """Return what Gpus.use() takes."""

    def provider():
        if nccl is None:
            raise ConfigError("there is no NCCL in a simulation without one")
        return nccl

    return Drivers(SimulatedGpu.all.__getitem__, provider)
