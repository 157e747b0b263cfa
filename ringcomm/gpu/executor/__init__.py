"""Carries out operations on arrays of GPUs: their plans, order and streams."""
