"""Command lines: scripts of the repository and console commands of an installation run the same code."""

from deepspec.cli.job import main, with_stored_overrides

__all__ = ["main", "with_stored_overrides"]
