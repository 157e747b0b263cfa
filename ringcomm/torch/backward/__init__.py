"""Base of all distributed optimizers: hooks of autograd, passes, and agreement of ranks."""
