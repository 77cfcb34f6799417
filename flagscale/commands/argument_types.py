"""Meaning of single words of a command line."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from flagscale.errors import ConfigError


def parse_natural(text: str) -> int:
    """Parse a whole number from 0; a type of arguments for argparse."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number from 0, found {text!r}")
    return int(text)


def is_yaml(text: str) -> bool:
    """Return True if a text names a YAML file, which need not exist if its suffix is given."""
    return text.endswith((".yaml", ".yml")) or Path(f"{text}.yaml").is_file()


def split_hosts(text: str) -> list[str]:
    """Split hosts at commas outside brackets, where ``node[1-4,7]`` has ranges."""
    hosts = [word for word in re.split(r",(?![^\[]*\])|\s+", text) if word]
    if not hosts:
        raise ConfigError("--hosts: expected names with commas between them: --hosts a,b")
    return hosts
