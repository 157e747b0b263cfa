"""Starts an elastic job again that has lost a host, on the hosts that are left."""
