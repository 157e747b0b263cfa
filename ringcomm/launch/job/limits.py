"""What `ulimit` leaves for a job: files and processes. Pure.

Without enough, launcher and ranks abort.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ringcomm.errors import ConfigError

# Measured with Open MPI 5.0.11: descriptors of mpirun; threads of all that a job starts.
_FILES, _FILES_OF_A_RANK = 23, 4
_THREADS, _THREADS_OF_A_RANK = 5, 6


@dataclass(frozen=True)
class Limits:
    """files: `ulimit -n`. threads: `ulimit -u`, of which this user has `used`."""

    files: float = math.inf
    threads: float = math.inf
    used: int = 0

    def require(self, n_ranks: int) -> None:
        """Raise ConfigError if they do not allow so many ranks here, started by Open MPI."""
        ranks = f"{n_ranks} rank{'s' if n_ranks > 1 else ''}"
        files = _FILES + _FILES_OF_A_RANK * n_ranks
        if self.files < files:
            raise ConfigError(
                f"`ulimit -n` allows {self.files} open files, and mpirun needs {files} for {ranks} "
                "on this host; raise it (ulimit -n 1024)"
            )
        threads = _THREADS + _THREADS_OF_A_RANK * n_ranks
        if self.threads < self.used + threads:
            raise ConfigError(
                f"`ulimit -u` allows this user {self.threads} processes and threads, of which "
                f"{self.used} are there, and {ranks} on this host need {threads}; raise it, or end "
                "others"
            )
