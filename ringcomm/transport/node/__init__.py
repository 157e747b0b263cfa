"""The ranks of one host: who makes a node, the memory they share, and news of deaths."""

from enum import IntEnum

N_UNNAMED, N_NAMED = 16, 4096  # slots of a group, see csrc/shm/board.hpp


class To(IntEnum):
    """The ranks that get the result of a reduction; Target of csrc/shm/reduce_step.hpp."""

    ALL = 0
    OWNER = 1  # each rank its part
    ROOT = 2
