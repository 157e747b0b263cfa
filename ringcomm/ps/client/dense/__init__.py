"""Dense tables on a client: arrays in blocks."""
