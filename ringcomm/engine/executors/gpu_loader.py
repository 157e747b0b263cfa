"""The interface to ringcomm.gpu, which is loaded when the first array on a GPU appears."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

from ringcomm.arrays import current_gpu
from ringcomm.arrays.base import Array, DeviceAdapter, Span
from ringcomm.arrays.dtypes import DType
from ringcomm.arrays.host_mirror import Mirror
from ringcomm.engine.core.plan import Deferred, Plan
from ringcomm.engine.operations.base import Operation
from ringcomm.errors import ConfigError
from ringcomm.transport.channel import Channel

if TYPE_CHECKING:
    from ringcomm.engine.core.context import EngineContext
    from ringcomm.engine.core.group import Group

_MODULE: Final = "ringcomm.gpu.executor.executor"


class HostStaging(Protocol):
    """Moves arrays of one operation through host memory, after the earlier work of the stream."""

    def empty(self, like: Array, shape: tuple[int, ...]) -> Array:
        """Return an array on the same GPU."""

    async def fetch(self, x: Array) -> tuple[Mirror, object]:
        """Copy a contiguous array to host memory; return it, and an object to keep with it."""

    async def bring(
        self,
        t: Channel,
        *,
        out: Array,
        fill: Callable[[Mirror], Awaitable[object]],
        finish: Callable[[], Any],
    ) -> Deferred:
        """Call `fill` with a mirror of `out`, copy that to `out`, and return finish()'s result."""


class TransportChoice(Protocol):
    """The transport of a group's arrays on GPUs; str() also gives the reason."""

    @property
    def transport(self) -> str:
        """Return "nccl", "ipc" or "staged"."""


class DeviceExecutor(Protocol):
    """Carries out operations on arrays of GPUs; raises ConfigError if it cannot use the GPU."""

    def plan(self, operation: Operation) -> Plan[Any]: ...

    def stage(self, group: Group, adapter: DeviceAdapter, x: Array) -> HostStaging:
        """Return a Staging for the values that x has at this moment."""

    def make(
        self, group: Group, kind: str, dtype: DType, shape: tuple[int, ...]
    ) -> tuple[Array, HostStaging]:
        """Return an uninitialised array on a GPU, for a rank that has passed no array."""

    def copied(self, group: Group, x: Array) -> Array:
        """Return a copy, on a GPU, of an array in host memory."""

    def note_current(self, engine: EngineContext, index: int) -> None:
        """Note the GPU that make() and copied() use if this rank has used none before."""

    def require(self, engine: EngineContext) -> None:
        """Raise ConfigError with the reason if this rank can use no GPU."""

    def allocate(
        self, engine: EngineContext, adapter: DeviceAdapter, index: int, nbytes: int
    ) -> Span:
        """Return memory of a GPU that other ranks of the node can map. Raises MemoryError.

        It belongs to the current stream of the adapter's library.
        """

    def choice(self, engine: EngineContext, group: Group) -> TransportChoice | None:
        """Return the transport of the group's arrays, None before the first operation on them."""


@functools.cache
def device_executor() -> DeviceExecutor:
    """Return the executor of ringcomm.gpu. Raises ConfigError if that is not installed."""
    try:
        executor: DeviceExecutor = importlib.import_module(_MODULE).EXECUTOR
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("ringcomm.gpu"):
            raise
        raise ConfigError(
            "arrays on a GPU need ringcomm.gpu, which this installation lacks: install "
            "ringcomm anew, or pass arrays in host memory"
        ) from error
    return executor


def plan(operation: Operation) -> Plan[Any]:
    if operation.call.place is None:
        return operation.on_host()
    return device_executor().plan(operation)


def note_current_gpu(engine: EngineContext) -> None:
    """Note the current GPU of the user's thread, for arrays that other ranks may send."""
    index = current_gpu()
    if index is not None:
        with contextlib.suppress(ConfigError):  # raised again when an array for a GPU comes
            device_executor().note_current(engine, index)


def is_on_gpu(device: str) -> bool:
    """Return True for "cuda", False for "cpu". Raises ValueError for another device."""
    if device in ("cpu", "cuda"):
        return device == "cuda"
    hint = ""
    if str(device).startswith("cuda:"):
        index = str(device).removeprefix("cuda:")
        hint = (
            f", the current GPU. Call torch.cuda.set_device({index}) or cupy.cuda.Device({index})"
            ".use() before"
        )
    raise ValueError(f'device is {device!r}; it must be "cpu" or "cuda"{hint}')
