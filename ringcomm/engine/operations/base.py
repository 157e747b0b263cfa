"""The base of all operations, the checks that several of them share, and who carries them out.

That is this host or, for arrays on GPUs, ringcomm.gpu, which is loaded when the first one appears.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import operator
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Protocol, TypeVar

from ringcomm.arrays import AnyAdapter, Array, DeviceAdapter, Flat, Span, current_gpu
from ringcomm.arrays.base import Bytes
from ringcomm.arrays.dtypes import DType
from ringcomm.arrays.host_mirror import MIRROR, Mirror
from ringcomm.collectives.message_patterns import chunks
from ringcomm.collectives.operators import Op, ReductionOptions
from ringcomm.collectives.scale_factors import scale
from ringcomm.engine.core.call import Call
from ringcomm.engine.core.context import EngineContext
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.plan import Deferred, Plan
from ringcomm.errors import ConfigError
from ringcomm.integers import is_integer
from ringcomm.transport.channel import Channel
from ringcomm.transport.node import To
from ringcomm.transport.node.steps import NodeReduction

A = TypeVar("A", bound=Any)
_GPU: Final = "ringcomm.gpu.executor.plans"


@dataclass(slots=True, eq=False)
class Operation:
    """A collective whose arguments are checked; its arrays are in host memory or on a GPU."""

    group: Group
    call: Call  # on which all ranks must agree
    adapter: Any  # of its arrays: an ArrayAdapter in host memory, a DeviceAdapter on a GPU
    x: Any  # the array, or a list of the arrays
    mirrored: ClassVar[dict[str, Any]] = {}  # fields that on_mirrors() changes

    def on_host(self) -> Plan[Any]:
        """Return the plan for host memory; arrays that may change before it runs are copied now."""
        raise NotImplementedError

    def on_mirrors(self, mirrors: list[Any]) -> Plan[Any]:
        return replace(self, adapter=MIRROR, x=mirrors[0], **self.mirrored).on_host()


@dataclass(slots=True, eq=False)
class ArrayReduction(Operation):
    """A reduction of one array: allreduce, reduce, reduce_scatter."""

    options: ReductionOptions
    in_place: bool  # x gets the result
    is_borrowed: bool = False  # the caller keeps x unchanged until the end, so no copy is needed
    root: int = 0  # the rank that gets the result of a reduce
    to: ClassVar[To]
    mirrored: ClassVar[dict[str, Any]] = {"in_place": True}

    def working_copy(self) -> tuple[Any, Flat]:
        """Return a contiguous array, x times own_prescale, to reduce in place, and its memory."""
        adapter, options = self.adapter, self.options
        if self.in_place and not options.is_scaled:
            work = contiguous(self.x, adapter)
        else:
            work = adapter.copy(self.x)
        flat = adapter.flat(work)
        scale(flat, options.own_prescale)
        return work, flat


@dataclass(slots=True, eq=False)
class GroupedOperation(Operation):
    """A reduction of several arrays; `adapter` is a list with one for each."""

    options: ReductionOptions
    in_place: bool  # the arrays are overwritten by the results

    def on_mirrors(self, mirrors: list[Any]) -> Plan[Any]:
        adapters = [MIRROR] * len(mirrors)
        return replace(self, adapter=adapters, x=mirrors, in_place=True).on_host()


# --- who carries out an operation -----------------------------------------------------------------
def plan(operation: Operation) -> Plan[Any]:
    if operation.call.place is None:
        return operation.on_host()
    return device_executor().plan(operation)


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
        executor: DeviceExecutor = importlib.import_module(_GPU).EXECUTOR
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("ringcomm.gpu"):
            raise
        raise ConfigError(
            "arrays on a GPU need ringcomm.gpu, which this installation lacks: install "
            "ringcomm anew, or pass arrays in host memory"
        ) from error
    return executor


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


# --- checks that several operations share ---------------------------------------------------------
def rank_of(what: str, rank: int, group: Group) -> int:
    index = int_of(what, rank, "a rank, an int")
    if not 0 <= index < group.size:
        raise ValueError(f"{what} is {index}; ranks are 0 to {group.size - 1}")
    return index


def int_of(what: str, number: int, due: str = "an int") -> int:
    if not is_integer(number):
        raise TypeError(f"{what} must be {due}, not {number!r}")
    return operator.index(number)


def require_rows(shape: tuple[int, ...], kind: str) -> None:
    if not shape:
        raise ValueError(f"{kind} needs at least one dimension; use x.reshape(1) for a number")


def rows_call(
    kind: str, name: str | None, x: Array, adapter: AnyAdapter, root: int | None = None
) -> Call:
    shape = adapter.shape(x)
    require_rows(shape, kind)
    dtype = adapter.dtype(x).name
    return Call(kind, name, None, dtype, (None, *shape[1:]), root, place=adapter.place)


def rows_by_rank(shape: tuple[int, ...], group: Group) -> tuple[list[slice], slice]:
    """Return each rank's slice of elements, and this rank's slice of rows."""
    rows = chunks(shape[0], group.size)
    return chunks(shape[0], group.size, math.prod(shape[1:])), rows[group.index]


def contiguous(x: A, adapter: AnyAdapter) -> A:
    copied: A = x if adapter.is_contiguous(x) else adapter.copy(x)
    return copied


def reduction_in_node(
    source: Flat,
    target: Bytes | None,
    op: Op,
    group: Group,
    *,
    parts: Sequence[slice] = (),
    root: int | None = None,
) -> NodeReduction:
    """Return the reduction as a step in shared memory.

    With `parts`, each rank gets its part; with a root, it alone gets the result.
    """
    to = To.OWNER if parts else To.ALL if root is None else To.ROOT
    item = source.dtype.itemsize
    has_parts = parts and group.takes_steps
    bounds = [0, *(part.stop * item for part in parts)] if has_parts else ()
    divisor = op.divisor(group.size)
    return NodeReduction(
        source.bytes, target, op.kernel, source.dtype.kernel, divisor, to, root or 0, bounds
    )


def written(x: A, work: A, adapter: AnyAdapter, t: Channel | None = None) -> A:
    """Copy the result from `work` to x unless they are the same array; return x."""
    if work is x:
        adapter.written(x)
    else:
        with contextlib.nullcontext() if t is None else t.phase("copy"):
            adapter.assign(x, work)
    return x


def listed(kind: str, xs: Sequence[A]) -> Sequence[A]:
    if not isinstance(xs, list | tuple):
        raise TypeError(f"{kind} takes a list or tuple of arrays, not {type(xs).__qualname__}")
    return xs


def require_one_kind(kind: str, adapters: Sequence[AnyAdapter]) -> None:
    """Raise TypeError unless all arrays are in host memory, or all of one library on a GPU."""
    for i, each in enumerate(adapters):
        if each is not adapters[0] and (adapters[0].place or each.place):
            here, there = ("on a GPU" if a.place else "in host memory" for a in (adapters[0], each))
            where = "of another library" if here == there else there
            raise TypeError(
                f"{kind}: array 0 is {here}, array {i} is {where}. Pass arrays of one kind."
            )


def memory_of(x: Array, adapter: Any) -> Any:
    return adapter.flat(x) if adapter.place is None else adapter.span(x)


def extent_of(x: Array, adapter: Any) -> tuple[int, int]:
    memory = memory_of(x, adapter)
    if isinstance(memory, Flat):
        return memory.bytes.ctypes.data, memory.bytes.nbytes
    return memory.address, memory.nbytes
