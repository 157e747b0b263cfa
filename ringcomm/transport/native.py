"""MPI's own collectives, to compare with: the bench's, never the engine's.

After a death they hang or return wrong sums; the engine has algorithms of its own for that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ringcomm.transport.mpi import start_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")
Array = NDArray[Any]
Call = Callable[[], Array | None]
Start = Callable[[], object]

_ROOT = 0
_NAP_S = 5e-5  # a barrier that spins would keep late ranks off their cores


def start_native(*, with_settings: bool = True) -> NativeMpi:
    """Return MPI as its users see it. Collective; MPI is started if rc.init() has not done so.

    Args:
        with_settings: False: with MPI's own defaults, in a process that never calls rc.init().
    """
    return NativeMpi(start_mpi(with_settings=with_settings).mpi)


class NativeMpi:
    """The collectives of MPI, and a place to meet outside of what is measured.

    Attributes:
        name: "native".
        implementation: what MPI_Get_library_version() says.
        rank, size: in MPI_COMM_WORLD.
        local_size: ranks on this host.
        leaders: the first rank of each host.
    """

    name = "native"

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._comm: MPI.Comm = mpi.COMM_WORLD.Dup()
        self._meeting: MPI.Comm = mpi.COMM_WORLD.Dup()
        self.implementation: str = mpi.Get_library_version()
        self.rank: int = self._comm.rank
        self.size: int = self._comm.size
        node: MPI.Comm = self._comm.Split_type(mpi.COMM_TYPE_SHARED)
        self.local_size: int = node.size
        self.leaders: list[int] = sorted(set(self._comm.allgather(node.bcast(self.rank))))
        node.Free()

    # --- the place to meet ------------------------------------------------------------------
    def barrier(self) -> None:
        """Return when all ranks are here; sleeps meanwhile."""
        request = self._meeting.Ibarrier()
        while not request.Test():
            time.sleep(_NAP_S)

    def highest(self, value: float) -> float:
        """Return the highest value of any rank, on every rank."""
        return float(self._meeting.allreduce(value, op=self._mpi.MAX))

    def total(self, value: int) -> int:
        """Return the sum over all ranks, on every rank."""
        return int(self._meeting.allreduce(value))

    def gather(self, value: T) -> list[T] | None:
        """Return the values of all ranks on rank 0, None on the others."""
        values: list[T] | None = self._meeting.gather(value)
        return values

    def exchange(self, data: Array, dest: int, out: Array, source: int) -> None:
        """Send `data` to one rank while `out` comes from another."""
        self._meeting.Sendrecv(data, dest, recvbuf=out, source=source)

    def finalize(self) -> None:
        """End MPI; for a process that never called rc.init(), which would see to it."""
        self._comm.Free()
        self._meeting.Free()
        self._mpi.Finalize()

    # --- the collectives --------------------------------------------------------------------
    def refuses(self, collective: str, dtype: np.dtype[Any], op: str) -> str | None:
        """Return why MPI cannot do this, None if it can."""
        if op and dtype.name in ("float16", "bfloat16"):
            return f"MPI reduces no {dtype}"
        if op == "average" and dtype.kind not in "fc":
            return "MPI has no AVERAGE, and a sum divided by numpy is fair for floats only"
        return None

    def bind(self, collective: str, op: str, send: Array, recv: Array) -> Call:
        """Return the call that does it once; it returns the result, None where there is none.

        Args:
            collective: its name in ringcomm.
            op: name of an rc.Op; "" where nothing is reduced.
            send: shape (count,), what this rank passes in.
            recv: what comes out; `send` itself for the form in place.
        """
        result = self._result(collective, send, recv)
        known = _known(send)
        start = self._starter(collective, op, known, known if recv is send else _known(recv))

        def call() -> Array | None:
            start()
            if op == "average" and result is not None:
                np.divide(result, self.size, out=result)
            return result

        return call

    def _result(self, collective: str, send: Array, recv: Array) -> Array | None:
        is_rooted = collective in ("reduce", "gather")
        if collective == "barrier" or (is_rooted and self.rank != _ROOT):
            return None
        is_part_of_buffer = collective == "reduce_scatter" and recv is send
        return recv[: send.size // self.size] if is_part_of_buffer else recv

    def _starter(self, collective: str, op: str, send: Array, recv: Array) -> Start:
        comm, is_root = self._comm, self.rank == _ROOT
        source = self._mpi.IN_PLACE if recv is send else send
        operator = self._operator(op, send.dtype)
        starters: dict[str, Start] = {
            "allreduce": lambda: comm.Allreduce(source, recv, operator),
            "reduce": (
                (lambda: comm.Reduce(source, recv, operator, _ROOT))
                if is_root
                else (lambda: comm.Reduce(send, None, operator, _ROOT))
            ),
            "reduce_scatter": lambda: comm.Reduce_scatter_block(source, recv, operator),
            "allgather": lambda: comm.Allgather(send, recv),
            "gather": lambda: comm.Gather(send, recv if is_root else None, _ROOT),
            "scatter": lambda: comm.Scatter(send if is_root else None, recv, _ROOT),
            "alltoall": lambda: comm.Alltoall(send, recv),
            "broadcast": lambda: self._broadcast(send, recv),
            "barrier": comm.Barrier,
        }
        return starters[collective]

    def _broadcast(self, send: Array, recv: Array) -> None:
        if recv is not send and self.rank == _ROOT:
            np.copyto(recv, send)  # MPI has no form that leaves the argument alone
        self._comm.Bcast(recv, _ROOT)

    def _operator(self, op: str, dtype: np.dtype[Any]) -> Any:
        if dtype.kind == "b":
            logical = {"sum": "LOR", "max": "LOR", "bor": "LOR", "bxor": "LXOR"}
            return getattr(self._mpi, logical.get(op, "LAND"))
        names = {"product": "PROD", "average": "SUM", "": "SUM"}
        return getattr(self._mpi, names.get(op, op.upper()))


def _known(x: Array) -> Array:
    """Return x as elements that MPI has a name for: it only moves those it has none for."""
    return x.view(np.uint16) if x.dtype.name in ("float16", "bfloat16") else x
