"""torch.distributed.rpc as a parameter server, which `ringcomm bench ps` measures beside ours."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.distributed import rpc

_SERVER = "server"
_LEARNED: Final[dict[str, Tensor]] = {}  # on the server
# Requests are carried out by 16 threads, and operators release the GIL: without it additions of
# four clients are lost (`mpirun -np 5 ringcomm bench ps --cases sparse --against torch-rpc`).
_adding: Final = threading.Lock()


class Case(Protocol):
    """What is pushed and pulled; see ringcomm/launch/bench/ps/cases.py."""

    name: str
    shape: tuple[int, ...]
    is_sparse: bool
    n_rows: int


# --- on the server: module-level functions, for rpc names them ------------------------------------
def make(name: str, shape: Sequence[int]) -> None:
    """Make a tensor of zeros, if there is none."""
    _LEARNED.setdefault(name, torch.zeros(*shape))


def add(name: str, x: Tensor) -> None:
    """Add to a tensor."""
    with _adding:
        _LEARNED[name].add_(x)


def get(name: str) -> Tensor:
    """Return a tensor."""
    return _LEARNED[name]


def add_rows(name: str, keys: Tensor, rows: Tensor) -> None:
    """Add to rows of a tensor."""
    with _adding:
        _LEARNED[name].index_add_(0, keys, rows)


def get_rows(name: str, keys: Tensor) -> Tensor:
    """Return rows of a tensor."""
    return _LEARNED[name].index_select(0, keys)


# --- a process ------------------------------------------------------------------------------------
class TorchRpc:
    """A client of the server, or the server itself. Collective over all `size` processes.

    Args:
        rank: of this process; the last one is the server.
        size: number of processes.
        port: of this host, at which they meet.
        transports: that TensorPipe may use; its own choice if none are given.
    """

    def __init__(self, rank: int, size: int, port: int, *transports: str) -> None:
        torch.set_num_threads(1)
        options: Any = rpc.TensorPipeRpcBackendOptions(
            init_method=f"tcp://127.0.0.1:{port}", _transports=list(transports) or None
        )
        name = _SERVER if rank == size - 1 else f"client{rank}"
        start: Any = rpc.init_rpc
        start(name, rank=rank, world_size=size, rpc_backend_options=options)

    def bind(
        self, case: Case, x: Any, keys: Sequence[Any]
    ) -> tuple[Callable[[int], object], Callable[[int], Tensor]]:
        """Return push and pull of a tensor of zeros."""
        call: Callable[..., Any] = rpc.rpc_sync
        gradient, name = torch.from_numpy(x), case.name
        call(_SERVER, make, (name, (case.n_rows, *case.shape[1:])))
        if not case.is_sparse:
            return (
                lambda _: call(_SERVER, add, (name, gradient)),
                lambda _: call(_SERVER, get, (name,)),
            )
        sets = [torch.from_numpy(each.astype("int64")) for each in keys]
        return (
            lambda number: call(_SERVER, add_rows, (name, sets[number], gradient)),
            lambda number: call(_SERVER, get_rows, (name, sets[number])),
        )

    def close(self) -> None:
        """Leave, when all others do."""
        rpc.shutdown()
