"""Commands of `ringcomm ctl`, which all ranks take at the same training step."""
