"""The public functions: collectives, messages, registered arrays, init() and shutdown()."""
