"""Frames between clients and servers, and the wire that carries them."""
