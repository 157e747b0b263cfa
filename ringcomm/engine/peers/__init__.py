"""Conversations of ranks besides the collectives: groups, joining, where each of them is."""
