"""torch.distributed over gloo: what ringcomm is measured against."""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ringcomm.engine.api.collectives import broadcast_object
from ringcomm.engine.api.world import local_size, rank, size
from ringcomm.errors import ConfigError

T = TypeVar("T", bound=Any)
Array = NDArray[Any]
Start = Callable[[], object]
_ROOT = 0
_DTYPES = {"float16", "bfloat16", "float32", "float64", "bool", "complex64", "complex128"}
_DTYPES |= {"int8", "uint8", "int32", "int64"}
_OPS = {"average": "SUM", "": "SUM"}  # gloo has no AVG
_ALWAYS_IN_PLACE = ("allreduce", "reduce", "broadcast")
_ROOTED = ("reduce", "gather")
_PATIENCE = timedelta(minutes=10)


def start_gloo() -> None:
    """Make torch.distributed's default group, of gloo. Collective, after init().

    Raises:
        ConfigError: this torch has no gloo.
    """
    if dist.is_initialized():
        return
    if not dist.is_gloo_available():
        raise ConfigError("this torch was built without gloo")
    dist.init_process_group("gloo", store=_store(), rank=rank(), world_size=size())


class GlooEngine:
    """torch.distributed's collectives over gloo, on tensors that share memory with numpy arrays.

    Collective to make, after init().
    """

    name = "gloo"

    def __init__(self) -> None:
        start_gloo()

    def refuses(self, collective: str, dtype: np.dtype[Any], op: str) -> str | None:
        """Return why gloo cannot do this, None if it can."""
        if dtype.name not in _DTYPES:
            return f"gloo knows no {dtype}"
        if op and dtype.kind == "c" and op not in ("sum", "average"):
            return f"gloo has no {op} of {dtype}"
        if (dtype.name, op) == ("bool", "sum"):
            return "gloo adds bools as bytes"
        return None

    def bind(
        self, collective: str, op: str, send: Array, recv: Array
    ) -> Callable[[], Array | None]:
        """Return the call that does it once; it returns the result, None where there is none.

        Args:
            collective: its name in ringcomm.
            op: name of an rc.Op; "" where nothing is reduced.
            send: shape (count,), what this rank passes in.
            recv: what comes out; `send` itself for the form in place. gloo's reductions and
                broadcasts are in place: the other form copies first.
        """
        x = _tensor(send)
        out = x if recv is send else _tensor(recv)
        if recv is send and collective == "reduce_scatter":
            out, recv = _own_part(x), _own_part(send)
        if collective in _ALWAYS_IN_PLACE and out is not x:
            start = _after_copy(x, out, self._starter(collective, op, out, out))
        else:
            start = self._starter(collective, op, x, out)
        rounding = None if out.is_floating_point() or out.is_complex() else "trunc"
        has_result = collective != "barrier" and (collective not in _ROOTED or rank() == _ROOT)

        def call() -> Array | None:
            start()
            if op == "average":
                out.div_(size(), rounding_mode=rounding)
            return recv if has_result else None

        return call

    def _starter(self, collective: str, op: str, x: torch.Tensor, out: torch.Tensor) -> Start:
        reduction = getattr(dist.ReduceOp, _OPS.get(op, op.upper()))
        is_root = rank() == _ROOT
        starters: dict[str, Start] = {
            "allreduce": lambda: dist.all_reduce(out, reduction),
            "reduce": lambda: dist.reduce(out, _ROOT, reduction),
            "reduce_scatter": lambda: _scatter_sum(out, x, op=reduction),
            "allgather": lambda: _gather_all(out, x),
            "broadcast": lambda: dist.broadcast(out, _ROOT),
            "gather": lambda: dist.gather(x, _parts(out) if is_root else None, _ROOT),
            "scatter": lambda: dist.scatter(out, _parts(x) if is_root else None, _ROOT),
            "alltoall": lambda: dist.all_to_all_single(out, x),
            "barrier": dist.barrier,
        }
        return starters[collective]


# torch 2.13 renamed them, and warns of the names that 2.6 has.
_gather_all = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_sum = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _after_copy(x: torch.Tensor, out: torch.Tensor, start: Start) -> Start:
    def copy_and_start() -> None:
        out.copy_(x)
        start()

    return copy_and_start


def _tensor(x: Array) -> torch.Tensor:
    """Return a tensor of x's memory."""
    if x.dtype.name == "bfloat16":  # which numpy does not know itself
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def _own_part(x: T) -> T:
    part = len(x) // size()
    own: T = x[rank() * part : (rank() + 1) * part]
    return own


def _parts(x: torch.Tensor) -> list[torch.Tensor]:
    return list(x.chunk(size()))


def _store() -> Any:
    """Return a store that all ranks reach; no file of it can be left behind."""
    is_first = rank() == 0
    host = "127.0.0.1" if local_size() == size() else socket.gethostname()
    make: Any = dist.TCPStore  # type: ignore[attr-defined] # torch's __all__ leaves it out
    own = make(host, 0, size(), True, _PATIENCE, False) if is_first else None
    where = broadcast_object(None if own is None else (host, own.port))
    return own or make(*where, size(), False, _PATIENCE)
