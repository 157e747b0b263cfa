"""How ranks end: their status pages, the hooks that record an end, the guardian of each node."""
