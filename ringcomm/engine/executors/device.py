"""The executor of arrays on GPUs: ringcomm.gpu, which is loaded when the first of them appears."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

from ringcomm.arrays import current_gpu
from ringcomm.arrays.base import Array, DeviceAdapter, Span
from ringcomm.arrays.dtypes import DType
from ringcomm.arrays.mirror import Mirror
from ringcomm.engine.core.execution import Deferred, Plan
from ringcomm.engine.operations.base import Operation
from ringcomm.errors import ConfigError
from ringcomm.transport.channel import Channel

if TYPE_CHECKING:
    from ringcomm.engine.core.context import EngineContext
    from ringcomm.engine.core.group import Group

_MODULE: Final = "ringcomm.gpu.executor.executor"


class Staging(Protocol):
    """Moves arrays of one operation through host memory, behind what the caller's stream did."""

    def empty(self, like: Array, shape: tuple[int, ...]) -> Array:
        """Return an array on the same GPU."""

    async def fetch(self, x: Array) -> tuple[Mirror, object]:
        """Return a contiguous array's copy in host memory, and what keeps that memory."""

    async def bring(
        self,
        t: Channel,
        *,
        out: Array,
        fill: Callable[[Mirror], Awaitable[object]],
        finish: Callable[[], Any],
    ) -> Deferred:
        """Copy to a contiguous array what `fill` writes; its result is what `finish` returns."""


class TransportChoice(Protocol):
    """How a group's arrays on GPUs travel, and in words why: str()."""

    @property
    def transport(self) -> str:
        """Return "nccl", "ipc" or "staged"."""


class DeviceExecutor(Protocol):
    """Carries out operations on arrays of GPUs.

    Its methods raise ConfigError where the GPU cannot be used.
    """

    def plan(self, operation: Operation) -> Plan[Any]:
        """Return how an operation is carried out."""

    def stage(self, group: Group, adapter: DeviceAdapter, x: Array) -> Staging:
        """Return what moves x through host memory, as it is at this moment."""

    def make(
        self, group: Group, kind: str, dtype: DType, shape: tuple[int, ...]
    ) -> tuple[Array, Staging]:
        """Return an uninitialised array on a GPU of a rank that has passed none."""

    def copied(self, group: Group, x: Array) -> Array:
        """Return a copy, on a GPU, of an array in host memory."""

    def note_current(self, engine: EngineContext, index: int) -> None:
        """Note which GPU make() and copied() are to use if no other has been used."""

    def require(self, engine: EngineContext) -> None:
        """Raise ConfigError, which says what is missing, if this rank can use no GPU."""

    def allocate(self, engine: EngineContext, index: int, nbytes: int) -> Span:
        """Return memory of a GPU that other ranks of the node can map. Raises MemoryError."""

    def choice(self, engine: EngineContext, group: Group) -> TransportChoice | None:
        """Return how the group's arrays travel, None before its first operation on them."""


@functools.cache
def device_executor() -> DeviceExecutor:
    """Return the executor of ringcomm.gpu.

    Raises:
        ConfigError: this installation is without ringcomm.gpu.
    """
    try:
        executor: DeviceExecutor = importlib.import_module(_MODULE).EXECUTOR
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("ringcomm.gpu"):
            raise
        raise ConfigError(
            "arrays on a GPU need ringcomm.gpu, which this installation is without: install "
            "ringcomm anew, or pass arrays in host memory"
        ) from error
    return executor


def plan(operation: Operation) -> Plan[Any]:
    """Return how an operation is carried out where its arrays are."""
    if operation.call.place is None:
        return operation.on_host()
    return device_executor().plan(operation)


def note_current_gpu(engine: EngineContext) -> None:
    """Note the calling thread's GPU, which is a user's, for what other ranks may send to it."""
    index = current_gpu()
    if index is not None:
        with contextlib.suppress(ConfigError):  # raised where something for a GPU arrives
            device_executor().note_current(engine, index)


def is_on_gpu(device: str) -> bool:
    """Return True for "cuda", False for "cpu".

    Raises:
        ValueError: it is neither.
    """
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
