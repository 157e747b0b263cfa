"""The ranks of one host: which of them form a node, their shared memory, and their deaths."""

from enum import IntEnum

N_UNNAMED, N_NAMED = 16, 4096  # slots of a group, see csrc/shm/board.hpp


class To(IntEnum):
    """The ranks that get the result of a reduction; `Target` in csrc/shm/reduce_step.hpp."""

    ALL = 0
    OWNER = 1  # each rank gets its part
    ROOT = 2
