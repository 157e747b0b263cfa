"""The decisions of a server: events in, actions out. No I/O, no lock, no clock, no array."""
