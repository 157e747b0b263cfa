"""The status page of each rank, its last words, and the guardian that watches a node."""
