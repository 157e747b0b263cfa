"""Whether torch.distributed and MPI mean the same job: ranks are MPI's, or nobody's."""

from __future__ import annotations

from ringcomm import launched
from ringcomm.errors import ConfigError

_HOW = "Start the job with MPI: mpirun -np N python train.py, and leave RANK and WORLD_SIZE to it"


def require_launcher(size: int) -> None:
    """Raise if several ranks were started by something that is no MPI launcher; before MPI starts.

    Every process would be an MPI job of its own, rank 0 of 1, and sums would be of one rank.
    """
    if size <= 1 or launched.is_launched_by_mpi():
        return
    launcher = launched.foreign_launcher()
    by = f"{launcher} started this process" if launcher else "no MPI launcher started this process"
    raise ConfigError(
        f"torch.distributed wants {size} ranks, but {by}: to MPI it is rank 0 of 1. {_HOW}; or use "
        'init_process_group("gloo") with this launcher'
    )


def require_same_rank(rank: int, size: int, mpi_rank: int, mpi_size: int) -> None:
    """Raise if torch.distributed and MPI number the ranks differently."""
    if (rank, size) != (mpi_rank, mpi_size):
        raise ConfigError(
            f"torch.distributed says rank {rank} of {size} (RANK and WORLD_SIZE, or arguments of "
            f"init_process_group), MPI says rank {mpi_rank} of {mpi_size}. Unset RANK and "
            'WORLD_SIZE, and pass neither rank nor world_size: init_method="mpi://" takes both '
            "from MPI"
        )
