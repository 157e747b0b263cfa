"""Carries out operations on arrays of a GPU: teams, their streams, and what watches them."""
