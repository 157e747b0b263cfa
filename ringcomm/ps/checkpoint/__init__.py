"""Checkpoints: what the chief does, what servers do, and the files."""
