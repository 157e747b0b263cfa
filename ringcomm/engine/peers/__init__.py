"""Conversations of ranks beside the collectives: groups, joining, where each of them is."""
