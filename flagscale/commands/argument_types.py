"""Meaning of single words of a command line."""

from __future__ import annotations

import argparse
from pathlib import Path


def parse_natural(text: str) -> int:
    """Parse a whole number from 0; a type of arguments for argparse."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number from 0, found {text!r}")
    return int(text)


def is_yaml(text: str) -> bool:
    """Return True if a text names a YAML file, which need not exist if its suffix is given."""
    return text.endswith((".yaml", ".yml")) or Path(f"{text}.yaml").is_file()
