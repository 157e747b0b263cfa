"""The engine: it starts operations, lets ranks agree on them, and ends them."""
