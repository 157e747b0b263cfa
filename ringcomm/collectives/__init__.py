"""Collective algorithms, and the choice among them. Begin with message_patterns.py."""
