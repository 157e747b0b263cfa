"""Hash tables on a client: rows by key."""
