"""The version, for pyproject.toml to read and ranks to compare."""

__version__ = "0.1.0"
