"""What the ranks of one host share: whose neighbour each is, memory, and news of deaths."""

N_UNNAMED, N_NAMED = 16, 4096  # slots of a group, see csrc/shm/board.hpp
