"""Checks that torch.distributed and MPI number the ranks of the job alike."""

from __future__ import annotations

from ringcomm import launched
from ringcomm.engine.api.collectives import barrier
from ringcomm.engine.api.world import begin_anew, engine, init
from ringcomm.errors import CommTimeoutError, ConfigError


def begin() -> None:
    """Make this process a rank of its job, anew where ranks have waited in vain. Collective.

    After a timeout torch's programs destroy their process groups and make new ones. A rank that
    does not know of the timeout learns of it in the barrier, which the others do not enter.

    Raises:
        CommTimeoutError: a rank did not come.
        PeerFailedError: one died or failed.
    """
    init()
    current = engine()
    was_broken = current.state.is_broken
    try:
        barrier()
    except CommTimeoutError:
        gave_up_here = not was_broken and current.job_rank in current.watch.peers.gave_up
        if gave_up_here or not current.state.has_waited_in_vain:
            raise
        begin_anew()


def require_launcher(size: int) -> None:
    """Raise ConfigError if several ranks were started by no MPI launcher; before MPI starts."""
    instead = '; or use init_process_group("gloo") with this launcher'
    launched.require_mpi_launcher(size, "torch.distributed", or_else=instead)


def require_same_rank(rank: int, size: int, mpi_rank: int, mpi_size: int) -> None:
    """Raise if torch.distributed and MPI number the ranks differently."""
    if (rank, size) != (mpi_rank, mpi_size):
        raise ConfigError(
            f"torch.distributed says rank {rank} of {size} (RANK and WORLD_SIZE, or arguments of "
            f"init_process_group), MPI says rank {mpi_rank} of {mpi_size}. Unset RANK and "
            'WORLD_SIZE, and pass neither rank nor world_size: init_method="mpi://" takes both '
            "from MPI"
        )
