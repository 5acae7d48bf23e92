"""The version, in one place: the build reads it here too."""

__version__ = "0.1.0"
