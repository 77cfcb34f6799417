"""Which names and values look like secrets, so that they are never written down."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "<hidden>"

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+|[0-9]+")
_ALWAYS = frozenset(
    {"secret", "secrets", "password", "passwords", "passwd", "passphrase", "credential"}
    | {"credentials", "apikey", "webhook", "webhooks"}
)
_SHORT = frozenset({"pass", "pat", "pwd"})
_PLAIN_SHORT = frozenset({("pwd",), ("old", "pwd"), ("forward", "pass"), ("backward", "pass")})
_PASSWORD = re.compile(r"(?P<user>[A-Za-z][A-Za-z0-9+.\-]*://[^/?#\s:@]*:)[^/?#\s]+@")
_KEY_KINDS = frozenset({"access", "api", "auth", "encryption", "private", "signing", "ssh"})
_PLAIN_KEYS = frozenset({"foreign", "json", "primary", "public", "query", "sort", "text"})
_PLAIN_TOKENS = frozenset(
    {"begin", "bos", "cls", "end", "eod", "eos", "extra", "first", "image", "last", "mask"}
    | {"next", "pad", "padding", "per", "sep", "special", "start", "stop", "unk", "unknown"}
)


def is_secret_name(name: str) -> bool:
    """Whether a variable's or key's name looks like a secret's.

    ``HF_TOKEN``, ``WANDB_API_KEY``, ``AWS_SECRET_ACCESS_KEY``, ``DB_PASSWORD`` and ``GIT_PAT`` do;
    words of language models (``eod_token``, ``tokenizer_path``, ``tokens_per_second``) and the
    shell's ``PWD`` do not.
    """
    parts = [part.lower() for part in _WORDS.findall(name)]
    if not parts:
        return False
    before, last = parts[-2] if len(parts) > 1 else "", parts[-1]
    return (
        not _ALWAYS.isdisjoint(parts)
        or (not _SHORT.isdisjoint(parts) and tuple(parts) not in _PLAIN_SHORT)
        or any(b == "key" and a in _KEY_KINDS for a, b in itertools.pairwise(parts))
        or (last in ("key", "keys") and before not in _PLAIN_KEYS)
        or (last == "token" and before not in _PLAIN_TOKENS)
    )


def is_secret(name: str, value: Any) -> bool:
    """Whether a value is one that must not be written down: by its name, or since it is or holds
    an address with a password, ``scheme://user:password@host``."""
    if isinstance(value, (list, tuple)):
        return any(is_secret(name, item) for item in value)
    if not isinstance(value, str) or not value:
        return False
    return is_secret_name(name) or without_passwords(value) != value


def without_passwords(text: str) -> str:
    """A text in which the passwords of addresses are hidden."""
    return _PASSWORD.sub(rf"\g<user>{HIDDEN}@", text)


def redact(data: Mapping[Any, Any]) -> dict[Any, Any]:
    """A copy of nested plain data in which the values of secret names are hidden, and passwords of
    addresses everywhere."""
    return {key: _redacted(value, is_secret_name(str(key))) for key, value in data.items()}


def _redacted(value: Any, secret: bool) -> Any:
    if isinstance(value, Mapping):
        return {k: _redacted(v, secret or is_secret_name(str(k))) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redacted(item, secret) for item in value]
    if secret and value not in (None, ""):
        return HIDDEN
    return without_passwords(value) if isinstance(value, str) else value
