"""Optimizers whose state is spread over the ranks (ZeRO stage 1)."""
