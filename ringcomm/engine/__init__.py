"""Who calls what, in which order, and what every rank is promised. Contracts are in api/."""
