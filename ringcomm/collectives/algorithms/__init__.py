"""The algorithms of the collectives, coroutines that act through a Performer."""
