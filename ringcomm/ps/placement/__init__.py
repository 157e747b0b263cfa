"""Which server owns which partition, and when that changes."""
