"""Whether this process is still the one that made an engine."""

import os

_n_forks = 0


def n_forks() -> int:
    """Return how many forks lie between this process and the one that imported ringcomm.

    To ask for the process id is a system call, which for the shortest operations is too much.
    """
    return _n_forks


def _count() -> None:
    global _n_forks  # noqa: PLW0603 - a fact of the process
    _n_forks += 1


os.register_at_fork(after_in_child=_count)
