"""A server: keeps tables, and carries out the decisions of its core."""
