"""The command line: `pageforge info | run | demo | pool | bench | config`."""

from pageforge.cli.app import main

__all__ = ["main"]
