"""The version, defined in this place only."""

__version__ = "0.1.0.dev0"
