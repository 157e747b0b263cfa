"""Hands the loaded MPI library over to C++, which is compiled against none."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from ringcomm import _core

if TYPE_CHECKING:
    from mpi4py import MPI

_FUNCTIONS = (
    "MPI_Isend",
    "MPI_Irecv",
    "MPI_Send_init",
    "MPI_Recv_init",
    "MPI_Start",
    "MPI_Test",
    "MPI_Cancel",
    "MPI_Request_free",
    "MPI_Get_count",
    "MPI_Error_string",
)


def runner_over(mpi: Any, comm: MPI.Comm, segment_nbytes: int) -> _core.Runner:
    """Return what carries out recorded algorithms over a communicator.

    Args:
        mpi: the module mpi4py.MPI; it is linked to the library, so the functions are found in it.
        comm: its errors must be returned.
        segment_nbytes: longer messages are cut.

    Raises:
        OSError, AttributeError, ValueError: this library is not like those we know.
    """
    if mpi._sizeof(mpi.Status) > _core.MPI_STATUS_MAX:
        raise ValueError(f"an MPI_Status has {mpi._sizeof(mpi.Status)} bytes")
    library = ctypes.CDLL(mpi.__file__)
    functions = {name: _address(getattr(library, name)) for name in _FUNCTIONS}
    return _core.mpi_runner(
        functions,
        mpi._sizeof(mpi.Comm),
        mpi._handleof(mpi.BYTE),
        mpi._handleof(comm),
        segment_nbytes,
    )


def _address(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address
