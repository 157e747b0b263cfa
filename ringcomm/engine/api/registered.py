"""Arrays in memory that all ranks of a node map: reduced where they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from ringcomm.arrays import (
    DTYPES,
    Array,
    DeviceAdapter,
    DType,
    Span,
    device_adapter_of_kind,
    first_device_kind,
)
from ringcomm.arrays.base import Bytes, lengths_of
from ringcomm.arrays.numpy import NUMPY
from ringcomm.engine.api.world import engine
from ringcomm.engine.core.context import EngineContext
from ringcomm.engine.core.group import Group
from ringcomm.engine.executors.device import device_executor, is_on_gpu


class NodeMemory(NamedTuple):
    """Memory of this rank that its node maps, in bytes.

    Attributes:
        in_use: by arrays of rc.empty() and rc.zeros(), buckets, and operations under way.
        kept: given back, and kept for the next ones.
        highest: the most that was in use at a time.
    """

    in_use: int
    kept: int
    highest: int


def empty(
    shape: int | Sequence[int],
    dtype: DTypeLike,
    *,
    group: Group | None = None,
    device: str = "cpu",
) -> Array:
    """Return a registered array of undefined content: one that the ranks of this node map.

    A collective inside a node takes one pass over registered arrays, and four over others. Slices
    and views of it count as registered, torch.from_numpy(x) too. Local: no other rank need call it,
    and its memory is free again when the last view of it is gone. What a fork of this process
    writes there is the fork's own; pages that it has not written show what this process writes
    meanwhile. On a rank that shares no memory with another it is an ordinary array.

    Args:
        shape: of the array, or its length.
        dtype: as numpy takes it, or torch calls it, among those of rc.allreduce; "bfloat16" needs
            ml_dtypes.
        group: with whom it is to be reduced; all that share this node can.
        device: "cuda": a cupy array on the current GPU, in memory that the other GPUs of this node
            map; torch.as_tensor(x, device="cuda") shares it.

    Raises:
        TypeError, ValueError: no such dtype, shape or device.
        MemoryError: there is no room.
        ConfigError: there is no GPU that could be used; the text says what is missing.
    """
    current = engine()
    for_gpu = is_on_gpu(device)
    current.groups.or_default(group)
    name = str(dtype).removeprefix("torch.")
    is_named = name in DTYPES and not isinstance(dtype, type)
    kind = NUMPY.make(DTYPES[name], ()).dtype if is_named else np.dtype(dtype)
    NUMPY.dtype(np.empty(0, kind))
    lengths = lengths_of("empty", shape)
    nbytes = math.prod(lengths) * kind.itemsize
    if for_gpu:
        device_executor().require(current)
        on_device = device_adapter_of_kind(first_device_kind())
        index = on_device.current_device()
        return on_gpu(current, DTYPES[kind.name], lengths, on_device, index)
    data = _memory(current, nbytes)
    return np.empty(lengths, kind) if data is None else data.view(kind).reshape(lengths)


def zeros(
    shape: int | Sequence[int],
    dtype: DTypeLike,
    *,
    group: Group | None = None,
    device: str = "cpu",
) -> Array:
    """Return a registered array of zeros; see empty()."""
    x = empty(shape, dtype, group=group, device=device)
    x.fill(0)
    return x


def on_gpu(
    current: EngineContext, dtype: DType, shape: tuple[int, ...], adapter: DeviceAdapter, index: int
) -> Array:
    """Return a registered array on GPU `index`, of the adapter's library; see empty()."""
    memory = device_executor().allocate(current, index, math.prod(shape) * dtype.itemsize)
    span = Span(memory.address, math.prod(shape), dtype, memory.owner)
    return adapter.wrap(span, shape, index)


def node_memory() -> NodeMemory:
    """Return how much memory of this rank its node maps; zeros where none is shared."""
    return NodeMemory(*engine().shared_usage())


def _memory(current: EngineContext, nbytes: int) -> Bytes | None:
    try:
        if nbytes >= 1 << 63:
            raise MemoryError
        return current.shared_memory(nbytes)
    except MemoryError:
        in_use = current.shared_usage()[0]
        raise MemoryError(
            f"no room for {nbytes} bytes in this rank's shared memory, which is as large as the "
            f"machine's; {in_use} are in use"
        ) from None
