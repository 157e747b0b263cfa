"""Ends of ranks: status pages, the hooks that record an end, the guardian of each node."""
