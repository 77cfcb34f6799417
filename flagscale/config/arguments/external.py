"""What is asked of data that a user's own function brings. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flagscale.config.arguments.precision import Broken, Values
from flagscale.config.arguments.spec import arg

NAME, EXTERNAL = "external_data", "external"
NO_MODULE = (
    "its directory has to be on PYTHONPATH (experiment.envs), or give a file: "
    "path/to/file.py:function"
)
"""What helps where its module is not found."""
_FORM = "package.module:function or path/to/file.py:function"


@dataclass(frozen=True)
class External:
    """Batches that a function of the user's makes (docs/models.md)."""

    external_data: str | None = arg(
        None,
        f"Of dataloader_type external: the function that gives the micro-batches, as {_FORM}",
    )


def is_external(values: Values) -> bool:
    """Whether a function of the user's brings the data."""
    return bool(values["dataloader_type"] == EXTERNAL)


def place(text: str) -> tuple[str, str]:
    """The module or file of a function, and its name.

    Raises:
        ValueError: it is of another form.
    """
    where, colon, function = text.rpartition(":")
    dotted = is_file(where) or all(part.isidentifier() for part in where.split("."))
    if not (colon and where and function.isidentifier() and dotted):
        raise ValueError(f"expected {_FORM}, found {text!r}")
    return where, function


def is_file(where: str) -> bool:
    """Whether a function is in a file, not in a module that can be imported."""
    return where.endswith(".py")


def broken(values: Values) -> Iterator[Broken]:
    """What does not fit data of one's own."""
    given = values[NAME]
    if given is not None:
        try:
            place(given)
        except ValueError as error:
            yield NAME, str(error)
    if not is_external(values):
        return
    if given is None:
        yield NAME, f"is required by dataloader_type external: the function, as {_FORM}"
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path", "mock_data"):
        if values[name]:
            yield name, f"not with dataloader_type external: the data is {NAME}'s"
    if values["sft"]:
        yield "sft", f"true with dataloader_type external: {NAME} makes batches, not conversations"
