"""The ranks of one host: who makes a node, the memory they share, and news of deaths."""

N_UNNAMED, N_NAMED = 16, 4096  # slots of a group, see csrc/shm/board.hpp
