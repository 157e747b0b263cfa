"""Makes calls of CUDA that may wait until all streams are idle.

The driver loads a kernel, maps memory or registers host memory maybe only once all streams are
idle, and blocks the thread that launches meanwhile. Two rules keep ranks from waiting for each
other for ever, in whatever order their groups come to an operation:

- A rank makes such a call only while none of its streams waits for another rank, so the call ends.
- A rank enqueues an operation only after all its ranks have made their calls for it, so nothing for
  which a stream waits needs such a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from ringcomm.gpu.device.base import Device
from ringcomm.gpu.executor.launcher import CudaLauncher
from ringcomm.gpu.kernels.base import Kernel
from ringcomm.transport.channel import Until, Wait

R = TypeVar("R")


class IdleCalls:
    """The calls of this rank that need idle streams, on one GPU; for the progress loop alone.

    Args:
        device: the GPU.
        launcher: its thread.

    Attributes:
        n_wanted: number of calls that are to be made; load() waits until it is 0.
    """

    def __init__(self, device: Device, launcher: CudaLauncher) -> None:
        self._device = device
        self._launcher = launcher
        self.n_wanted = 0
        self._are_idle: list[Callable[[], bool]] = []  # of each stream

    async def call(self, call: Callable[[], R]) -> R:
        """Make a call once no stream waits for another rank, and return its result."""
        self.n_wanted += 1
        try:
            while not self._is_idle():
                await Wait((Until(self._is_idle),))
            return await self._launcher.call(call)
        finally:
            self.n_wanted -= 1

    async def load(self, kernels: Sequence[Kernel]) -> None:
        """Load the kernels that are not loaded yet. Raises ConfigError if one cannot be compiled.

        An operation with nothing to load waits, too, while there are other calls to make: a steady
        flow of operations would keep the streams busy for ever.
        """
        missing = [each for each in kernels if not self._device.has_loaded(each)]

        def load_all() -> None:
            for each in missing:
                self._device.load(each)

        if missing:
            await self.call(load_all)
        elif self.n_wanted:
            await Wait((Until(lambda: not self.n_wanted),))

    def add_stream(self, is_idle: Callable[[], bool]) -> None:
        """Make calls only if is_idle(): a stream waits for no other rank, and is not about to."""
        self._are_idle.append(is_idle)

    def remove_stream(self, is_idle: Callable[[], bool]) -> None:
        self._are_idle.remove(is_idle)

    def _is_idle(self) -> bool:
        return all(is_idle() for is_idle in tuple(self._are_idle))
