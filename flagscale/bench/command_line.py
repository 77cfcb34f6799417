"""What the command lines of all measuring commands have in common."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import NoReturn

from flagscale.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """argparse whose mistakes are the project's errors, with the nearest flag named."""

    def __init__(self, prog: str, description: str, epilog: str | None = None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, hint=f"{self.prog} --help")

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse a whole command line.

        Raises:
            ConfigError: a flag is unknown, lacks its value or has a wrong one.
        """
        options, rest = self.parse_known_args(arguments)
        if rest:
            word = rest[0].partition("=")[0]
            if not word.startswith("-"):
                self.error(f"unexpected argument {word}")
            flags = [flag for flag in self._option_string_actions if len(flag) > 2]
            near = difflib.get_close_matches(word, flags, n=1, cutoff=0.7)
            self.error(f"unknown flag {word}" + (f"; did you mean {near[0]}?" if near else ""))
        return options


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'all_gather'?`` where one of ``known`` is near, else nothing."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
