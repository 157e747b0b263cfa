"""Algorithms: arrays of bytes in, arrays of bytes out. Read schedule.py, then ring.py."""
