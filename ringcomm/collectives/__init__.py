"""Collective algorithms, and the choice among them. Read schedule.py, then algorithms/ring.py."""
