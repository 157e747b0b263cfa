"""Partitions of dense tables on a server: their blocks, means of rounds, and requests."""
