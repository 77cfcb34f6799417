"""What a YAML may set of a communication backend, under ``train.system.comm``.

Most libraries are steered by environment variables, so an adapter's documented variables are its
options, under the variable's name without the library's: ``GLOO_SOCKET_IFNAME`` is
``socket_ifname`` of gloo. Some adapters have options of their own beside these. Imports no torch.
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
    """One of them."""

    name: str
    doc: str
    kind: Literal["text", "bool", "int"] = "text"
    minimum: int = 0
    maximum: int | None = None
    variable: str | None = None
    """The environment variable that it becomes, if it becomes one."""
    pattern: str | None = None
    """What all of a text must match, if not every text will do; ``shape`` says it in words."""
    shape: str = "a text"

    @property
    def expected(self) -> str:
        """The values it takes, in words."""
        if self.kind == "bool":
            return "true or false"
        if self.kind == "int":
            most = "" if self.maximum is None else f" to {self.maximum}"
            return f"a whole number from {self.minimum}{most}"
        return self.shape

    def convert(self, text: str) -> OptionValue:
        """The value that ``text`` means.

        Raises:
            ValueError: it means none.
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


def of_variables(library: str, environment: Mapping[str, str]) -> tuple[Option, ...]:
    """The options that documented variables amount to."""
    prefix = f"{library.upper()}_"
    return tuple(
        Option(variable.removeprefix(prefix).lower(), doc, variable=variable)
        for variable, doc in environment.items()
    )


def parse(backend: str, options: Sequence[Option], words: Iterable[str]) -> dict[str, OptionValue]:
    """The values of ``name=value`` words.

    Raises:
        ConfigError: with every word that is no option of ``backend`` or has an unfit value.
    """
    known = {option.name: option for option in options}
    values: dict[str, OptionValue] = {}
    problems: list[Problem] = []
    for word in words:
        name, equals, text = word.partition("=")
        option = known.get(name)
        if option is None:
            problems.append(Problem(name, _unknown(backend, name, known)))
        elif not equals:
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


def _unknown(backend: str, name: str, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    listed = f" (it has {', '.join(names)})" if names else " (it has none)"
    return f"is no option of {backend}{meant}{listed}"


def export(options: Sequence[Option], values: OptionValues) -> None:
    """Set the variables of this process that ``values`` amount to. A library reads them when its
    first group is made."""
    for option in options:
        value = values.get(option.name)
        if option.variable is None or value is None:
            continue
        os.environ[option.variable] = str(int(value)) if isinstance(value, bool) else str(value)
