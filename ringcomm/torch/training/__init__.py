"""Checkpoints, metrics and learning rates for data-parallel training."""
