"""Text of the chat template that a run trains with, which its checkpoints keep."""

from __future__ import annotations

import argparse
from pathlib import Path

from flagscale.config.arguments.rules.data import trains_on_conversations
from flagscale.errors import CheckpointError, DataError
from flagscale.tokenizer_files import DEFAULT_TEMPLATE, read_chat_templates, read_settings

MANIFEST_KEY = "chat_template"
"""Key of the text in a checkpoint's manifest."""


def read_chat_template(args: argparse.Namespace) -> str | None:
    """Return the text of the template that ``chat_template`` names, or of the tokenizer's own.

    Returns:
        None if the run trains on no conversations, or the tokenizer has no files with a template.

    Raises:
        CheckpointError: the file cannot be read.
    """
    from flagscale.train.data.chat.templates import NAMED_TEMPLATES

    name = args.chat_template
    if not trains_on_conversations(vars(args)):
        return None
    if name is None:
        path = args.tokenizer_path
        return read_tokenizer_template(Path(path)) if path else None
    if name in NAMED_TEMPLATES:
        return NAMED_TEMPLATES[name]
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"chat_template: {name} cannot be read, and checkpoints would lack it: {error}"
        ) from error


def read_tokenizer_template(directory: Path) -> str | None:
    """Return the default chat template in a tokenizer's directory; None if there is none."""
    try:
        settings = read_settings(directory)
        templates = read_chat_templates(directory, settings.get("chat_template"))
    except (DataError, OSError, ValueError):
        return None  # opening the tokenizer reports the error
    return templates.get(DEFAULT_TEMPLATE)
