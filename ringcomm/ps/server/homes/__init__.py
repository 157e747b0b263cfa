"""Homes: servers of which another process has a copy, so that they survive a death."""
