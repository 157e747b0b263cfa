"""Registered arrays lie in memory that all ranks of a node map, so no rank copies them."""

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
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.core.context import EngineContext
from ringcomm.engine.core.group import Group
from ringcomm.engine.operations.base import device_executor, is_on_gpu


class NodeMemory(NamedTuple):
    """Bytes of this rank's memory that the ranks of its node map.

    Attributes:
        in_use: bytes of arrays of rc.empty() and rc.zeros(), buckets, and operations under way.
        kept: bytes that are free again, and kept for later arrays.
        highest: the largest value of in_use so far.
    """

    in_use: int
    kept: int
    highest: int


def empty(
    shape: int | Sequence[int], dtype: DTypeLike, *, group: Group | None = None, device: str = "cpu"
) -> Array:
    """Return a registered array of undefined values: the ranks of this node map its memory.

    A collective inside a node takes one pass over registered arrays, and four over others. Slices
    and views are registered, too, also torch.from_numpy(x). Local: other ranks need not call this.
    The memory is free again when the last view is gone. A forked child does not write to the
    parent's memory: a page that the child writes becomes a private copy, and its other pages show
    what the parent writes. On a rank that shares no memory this is an ordinary array.

    Args:
        shape: shape of the array, or its length.
        dtype: a dtype of numpy or torch, or its name, that rc.allreduce accepts; "bfloat16" needs
            ml_dtypes.
        group: a group of this rank; only checked, as all groups on this node can use the array.
        device: "cpu", or "cuda" for a cupy array on the current GPU, in memory that the other GPUs
            of this node map; torch.as_tensor(x, device="cuda") shares that memory.

    Raises:
        TypeError, ValueError: no such dtype, shape or device.
        MemoryError: there is no room.
        ConfigError: this rank can use no GPU; the text says what is missing.
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
    shape: int | Sequence[int], dtype: DTypeLike, *, group: Group | None = None, device: str = "cpu"
) -> Array:
    """Return a registered array of zeros; see empty()."""
    x = empty(shape, dtype, group=group, device=device)
    x.fill(0)
    return x


def on_gpu(
    current: EngineContext, dtype: DType, shape: tuple[int, ...], adapter: DeviceAdapter, index: int
) -> Array:
    nbytes = math.prod(shape) * dtype.itemsize
    memory = device_executor().allocate(current, adapter, index, nbytes)
    span = Span(memory.address, math.prod(shape), dtype, memory.owner)
    return adapter.wrap(span, shape, index)


def node_memory() -> NodeMemory:
    """Return how much of this rank's memory its node maps; zeros if it shares none."""
    return NodeMemory(*engine().shared_usage())


def _memory(current: EngineContext, nbytes: int) -> Bytes | None:
    try:
        if nbytes >= 1 << 63:
            raise MemoryError
        return current.shared_memory(nbytes)
    except MemoryError:
        in_use = current.shared_usage()[0]
        raise MemoryError(
            f"no room for {nbytes} bytes in this rank's shared memory, which can grow to the "
            f"machine's memory; {in_use} bytes are in use"
        ) from None
