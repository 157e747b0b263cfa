"""The algorithms: coroutines over a Performer; arrays in, arrays out."""
