"""JSON files of a Hugging Face tokenizer directory: settings, special and added tokens, templates.

Uses the standard library alone, because the launcher reads these files too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flagscale.errors import DataError

SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
DEFAULT_TEMPLATE = "default"
TEMPLATE_FILE = "chat_template.jinja"
_TEMPLATE_DIRECTORY = "additional_chat_templates"

Token = str | Mapping[str, Any]
"""A special token as text, or any token as an object with ``content`` and flags."""


_WITHOUT_VOCABULARY = frozenset(
    {
        "config.json",
        "generation_config.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.json",
        "preprocessor_config.json",
        "processor_config.json",
        "adapter_config.json",
        "quantize_config.json",
        "params.json",
        "LICENSE.txt",
        "USE_POLICY.txt",
        "README.txt",
        "requirements.txt",
    }
)
VOCABULARY_SUFFIXES = (".json", ".model", ".txt", ".tiktoken")


def find_vocabulary_files(directory: Path) -> list[Path]:
    """Return the files of a Hugging Face directory that may hold the tokens of a tokenizer:
    ``tokenizer.json``, ``vocab.txt``, ``spiece.model`` and the like. Settings and weights are not
    among them.
    """
    return sorted(
        path
        for path in directory.iterdir()
        if path.suffix in VOCABULARY_SUFFIXES
        and path.name not in _WITHOUT_VOCABULARY
        and not path.name.endswith(".index.json")
        and path.is_file()
    )


def read_settings(directory: Path) -> dict[str, Any]:
    """Read a tokenizer's settings from ``tokenizer_config.json``, and the special tokens that only
    ``special_tokens_map.json`` names. Null counts as missing.

    Raises:
        DataError: a file is not a JSON object.
    """
    settings = {
        **read_json_object(directory / "special_tokens_map.json"),
        **read_json_object(directory / "tokenizer_config.json"),
    }
    return {name: value for name, value in settings.items() if value is not None}


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if there is no file.

    Raises:
        DataError: the file is not a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def iter_declared_tokens(
    directory: Path, settings: Mapping[str, Any]
) -> Iterator[tuple[Token, int | None]]:
    """Yield the tokens that files other than ``tokenizer.json`` declare, each with its id or None.

    Args:
        directory: the tokenizer's directory.
        settings: result of :func:`read_settings`.
    """
    for index, token in (settings.get("added_tokens_decoder") or {}).items():
        yield token, int(index)
    for text, index in read_json_object(directory / "added_tokens.json").items():
        yield {"content": text}, int(index)
    for name in SPECIAL_TOKEN_NAMES:
        if name in settings:
            yield settings[name], None
    for name in ("additional_special_tokens", "extra_special_tokens"):
        tokens = settings.get(name) or ()
        for token in tokens.values() if isinstance(tokens, dict) else tokens:
            yield token, None


def token_text(token: Any) -> str | None:
    """Return the text of a token, or None if ``token`` is no token."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def read_chat_templates(directory: Path, setting: Any) -> dict[str, str]:
    """Return a directory's chat templates (Jinja) by name, usually only ``default``.

    Files take precedence over ``setting``, the value of ``chat_template`` in
    ``tokenizer_config.json``.
    """
    files = {path.stem: path for path in sorted((directory / _TEMPLATE_DIRECTORY).glob("*.jinja"))}
    if (directory / TEMPLATE_FILE).is_file():
        files[DEFAULT_TEMPLATE] = directory / TEMPLATE_FILE
    if files:
        return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    if isinstance(setting, str):
        return {DEFAULT_TEMPLATE: setting}
    items = setting if isinstance(setting, list) else ()
    return {
        item["name"]: item["template"]
        for item in items
        if isinstance(item, dict) and {"name", "template"} <= item.keys()
    }
