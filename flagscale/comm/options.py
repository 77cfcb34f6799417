"""Options of communication backends in a YAML, under ``train.system.comm``.

Most libraries are configured by environment variables. Therefore an adapter's documented
variables are its options, named without the library's prefix: ``GLOO_SOCKET_IFNAME`` is
``socket_ifname`` of gloo. Some adapters define further options. Imports no torch.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from flagscale.errors import ConfigError, Problem

OptionValue = bool | int | str
OptionValues = Mapping[str, OptionValue]


@dataclass(frozen=True)
class Option:
    """One option of a communication backend."""

    name: str
    doc: str
    kind: Literal["text", "bool", "int"] = "text"
    minimum: int = 0
    maximum: int | None = None
    variable: str | None = None
    """Environment variable that the option sets, if any."""
    pattern: str | None = None
    """Regular expression that a text must match completely; ``shape`` describes it in messages."""
    shape: str = "a text"

    @property
    def expected(self) -> str:
        """Description of the valid values."""
        if self.kind == "bool":
            return "true or false"
        if self.kind == "int":
            upper_bound = "" if self.maximum is None else f" to {self.maximum}"
            return f"a whole number from {self.minimum}{upper_bound}"
        return self.shape

    def convert(self, text: str) -> OptionValue:
        """Convert text to a value.

        Raises:
            ValueError: the text is no valid value.
        """
        if self.kind == "int":
            number = int(text)
            if number < self.minimum or (self.maximum is not None and number > self.maximum):
                raise ValueError(text)
            return number
        if self.kind == "bool" and text.lower() not in ("true", "false"):
            raise ValueError(text)
        if not text or "\0" in text or (self.pattern and not re.fullmatch(self.pattern, text)):
            raise ValueError(text)
        return text.lower() == "true" if self.kind == "bool" else text


def options_from_variables(library: str, environment: Mapping[str, str]) -> tuple[Option, ...]:
    """Return the options for a library's documented environment variables."""
    prefix = f"{library.upper()}_"
    return tuple(
        Option(variable.removeprefix(prefix).lower(), doc, variable=variable)
        for variable, doc in environment.items()
    )


def parse_options(
    backend: str, options: Sequence[Option], words: Iterable[str]
) -> dict[str, OptionValue]:
    """Parse ``name=value`` words to option values.

    Raises:
        ConfigError: contains every unknown option and every invalid value.
    """
    option_by_name = {option.name: option for option in options}
    values: dict[str, OptionValue] = {}
    problems: list[Problem] = []
    for word in words:
        name, separator, text = word.partition("=")
        option = option_by_name.get(name)
        if option is None:
            problems.append(Problem(name, _unknown_option_message(backend, name, option_by_name)))
        elif not separator:
            problems.append(Problem(name, f"has no value; expected {option.expected}"))
        elif name in values:
            problems.append(Problem(name, "is given twice"))
        else:
            try:
                values[name] = option.convert(text)
            except ValueError:
                problems.append(Problem(name, f"expected {option.expected}, found {text!r}"))
    if problems:
        raise ConfigError(problems)
    return values


def _unknown_option_message(backend: str, name: str, option_names: Iterable[str]) -> str:
    names = list(option_names)
    close_matches = difflib.get_close_matches(name, names, n=1)
    suggestion = f"; did you mean {close_matches[0]!r}?" if close_matches else ""
    all_names = f" (it has {', '.join(names)})" if names else " (it has none)"
    return f"is no option of {backend}{suggestion}{all_names}"


def export_variables(options: Sequence[Option], values: OptionValues) -> None:
    """Set this process's environment variables for option values.

    Libraries read them when their first group is created.
    """
    for option in options:
        value = values.get(option.name)
        if option.variable is None or value is None:
            continue
        os.environ[option.variable] = str(int(value)) if isinstance(value, bool) else str(value)
