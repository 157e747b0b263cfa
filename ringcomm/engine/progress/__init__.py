"""The one wait loop: it advances operations, keeps their deadlines and records them."""
