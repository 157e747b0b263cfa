"""A thread that calls CUDA for the progress loop.

Any call of CUDA may block for as long as a stream waits for another rank: the first launch of a
kernel, also by another library, waits until all streams are idle, and holds the context's lock
meanwhile. The loop must not block then, because it is the loop that notices deaths and deadlines,
and ends the waits of streams.
"""

from __future__ import annotations

import copy
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from ringcomm.errors import RingcommError
from ringcomm.gpu.device.base import Device
from ringcomm.transport.channel import Until, Wait

R = TypeVar("R")
_PROMPT_S: Final = 2e-3  # a call that takes longer is awaited by the loop, beside all else
_CHECK_EVERY_S: Final = 0.05


class Calling(Generic[R]):
    """A call that the thread makes, or will make."""

    def __init__(self, call: Callable[[], R]) -> None:
        self._call: Callable[[], R] | None = call
        self._result: R  # set by make(), unless that sets _error
        self._error: BaseException | None = None
        self._running = threading.Lock()
        self._running.acquire()
        self.is_over = False

    def make(self) -> None:
        """Make the call; only the thread does so."""
        assert self._call is not None
        try:
            self._result = self._call()
        except BaseException as error:  # noqa: BLE001 - raised by result()
            self._error = error
        self._end()

    def refuse(self) -> None:
        self._error = RingcommError("the GPU is not used any more: the engine was closed")
        self._end()

    def wait(self, timeout_s: float) -> bool:
        return self.is_over or self._running.acquire(timeout=timeout_s)

    def result(self) -> R:
        if self._error is not None:
            raise self._error
        return self._result

    def _end(self) -> None:
        self._call = None  # and what it holds
        self.is_over = True
        self._running.release()


class CudaLauncher:
    """The thread of one GPU, which starts with the first call and ends with this object.

    Args:
        device: the GPU.
        stream: one of its streams, which is asked whether the GPU has failed.
    """

    def __init__(self, device: Device, stream: int) -> None:
        self._work = _CallWork(device, stream)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_stopped = False
        weakref.finalize(self, self._work.calls.put, None)

    async def call(self, call: Callable[[], R]) -> R:
        """Make a call of CUDA, in the order of these calls; the progress loop goes on meanwhile."""
        calling = self.submit(call)
        if not calling.wait(_PROMPT_S):
            await Wait((Until(lambda: calling.is_over),))
        return calling.result()

    def submit(self, call: Callable[[], R]) -> Calling[R]:
        calling = Calling(call)
        with self._lock:
            if self._is_stopped:
                calling.refuse()
                return calling
            self._work.calls.put(calling)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work.run, name="ringcomm-gpu-launch", daemon=True
                )
                self._thread.start()
        return calling

    def require_sound(self) -> None:
        if self._work.failure is not None:
            raise copy.copy(self._work.failure)
        if not self._work.is_watched:
            self._work.is_watched = True
            self.submit(lambda: None)  # wakes the thread, which looks in a while

    def stop(self) -> None:
        """End the thread after its present call; refuse all others."""
        with self._lock:
            self._is_stopped = True
            self._work.calls.put(None)
            if self._thread is None:
                self._work.refuse_all()


class _CallWork:
    """The loop of the thread, which does not refer to the Launcher."""

    def __init__(self, device: Device, stream: int) -> None:
        self._device = device
        self._stream = stream
        self.calls: queue.SimpleQueue[Calling[Any] | None] = queue.SimpleQueue()
        self.is_watched = False  # somebody waits for the GPU
        self.failure: RingcommError | None = None

    def run(self) -> None:
        # Without the context, a library that leaves a stream would make one on GPU 0, of half a
        # gigabyte. In this thread no function of CUDA disturbs the capture of a graph elsewhere.
        with self._device.active():
            self._device.leave_captures_alone()
            while (calling := self._next()) is not None:
                calling.make()
                del calling  # and what it holds
        self.refuse_all()

    def _next(self) -> Calling[Any] | None:
        while True:
            try:
                return self.calls.get(timeout=_CHECK_EVERY_S if self.is_watched else None)
            except queue.Empty:
                self._check()

    def _check(self) -> None:
        self.is_watched = False
        try:
            self._device.require_sound(self._stream)
        except RingcommError as error:
            self.failure = error

    def refuse_all(self) -> None:
        """Refuse the calls that have not begun; none can be added."""
        while True:
            try:
                calling = self.calls.get_nowait()
            except queue.Empty:
                return
            if calling is not None:
                calling.refuse()
