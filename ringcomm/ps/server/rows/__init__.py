"""Rows of hash tables on a server: the shard in memory, gradients, and requests."""
