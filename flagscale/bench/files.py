"""Files that a command line names, where each host may have a disk of its own."""

from __future__ import annotations

from flagscale.errors import ConfigError


class UnreadableFileError(ConfigError):
    """A file of the command line cannot be read on this host. Others may have it, so the rank that
    lacks it says so, whichever it is."""
