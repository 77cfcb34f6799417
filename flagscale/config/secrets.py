"""Which names and values look like secrets, so that they are never written down."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

HIDDEN = "<hidden>"

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+|[0-9]+")
_ALWAYS = (
    *("secret", "secrets", "password", "passwords", "passwd", "passphrase", "credential"),
    *("credentials", "webhook", "webhooks", "apikey", "privkey", "privatekey", "secretkey"),
    *("accesskey", "sshkey"),
)
"""A word of a name that ends in one of these, as in ``PGPASSWORD``, tells a secret."""
_LAST = ("auth", "authorization", "bearer", "cookie", "cookies", "jwt", "pass", "pwd")
"""The last word of a name that ends in one of these, as in ``SSHPASS``, tells a secret."""
_NOT_LAST = frozenset(
    {"allpass", "askpass", "backwardpass", "bandpass", "bypass", "compass", "encompass"}
    | {"firstpass", "forwardpass", "highpass", "lowpass", "multipass", "oldpwd", "onepass"}
    | {"overpass", "pwd", "pass", "secondpass", "singlepass", "surpass", "twopass", "underpass"}
)
"""Words like those of ``_LAST`` that tell none; ``pass`` and ``pwd`` have rules of their own."""
_SWITCHES = frozenset(
    {"allow", "disable", "enable", "has", "is", "no", "require", "requires", "skip", "use"}
    | {"uses", "with", "without"}
)
_SHORT = frozenset({"pass", "pat", "pwd"})
_PLAIN_SHORT = frozenset({("pwd",), ("old", "pwd"), ("forward", "pass"), ("backward", "pass")})
_PASSWORD = re.compile(r"(?P<user>[A-Za-z][A-Za-z0-9+.\-]*://[^/?#\s:@]*:)[^/?#\s]+@")
_QUERY = re.compile(r"(?<=://)[^\s?#]*[?#]\S+")
_PARAMETER = re.compile(r"(?P<upto>[?&;#](?P<name>[^=&;#?\s]+)=)(?:[^&;#\s]|;(?![^=&;#?\s]+=))+")
_HEADER = re.compile(r"(?P<upto>\bauthorization\s*:\s*(?:\w+\s+)?)[^\s'\"]+", re.IGNORECASE)
_PAIR = re.compile(
    r"""(?<![^\s;,"'({\[])(?P<upto>(?P<name>[A-Za-z_\-][\w.\-]*)\s*=\s*)"""
    r"""(?:"[^"]*"|'[^']*'|[^;\s]+(?:[^\S\n]+[^;=\s]+)*(?=\s*(?:;|$))|[^;\s]+)"""
)
"""``name=value`` in a text, as in the string that tells how to reach a database; a value holds
spaces only up to a semicolon or the end."""
_IN_PAIRS = frozenset({"sig", "signature", "pwd"})
_KEY_KINDS = frozenset({"access", "api", "auth", "encryption", "private", "signing", "ssh"})
_PLAIN_KEYS = frozenset({"foreign", "json", "primary", "public", "query", "sort", "text"})
_PLAIN_TOKENS = frozenset(
    {"begin", "bos", "cls", "end", "eod", "eos", "extra", "first", "image", "last", "mask"}
    | {"next", "pad", "padding", "per", "sep", "special", "start", "stop", "unk", "unknown"}
)
_PLAIN_TOKEN_WORDS = frozenset(f"{kind}token" for kind in (*_PLAIN_TOKENS, "de", "sub", ""))
"""``token`` itself has a rule of its own."""


def is_secret_name(name: str) -> bool:
    """Return whether the name of a variable or key suggests a secret.

    ``HF_TOKEN``, ``WANDB_API_KEY``, ``AWS_SECRET_ACCESS_KEY``, ``DB_PASSWORD``, ``SSHPASS``,
    ``MYAUTH`` and ``GIT_PAT`` do; words of language models (``eod_token``, ``tokenizer_path``,
    ``tokens_per_second``), the shell's ``PWD``, what only tells how (``AUTH_TYPE``, ``USE_JWT``)
    and an ``AUTHOR`` do not.
    """
    parts = [part.lower() for part in _WORDS.findall(name)]
    if not parts:
        return False
    before, last = parts[-2] if len(parts) > 1 else "", parts[-1]
    return (
        any(part.endswith(_ALWAYS) for part in parts)
        or (not _SHORT.isdisjoint(parts) and tuple(parts) not in _PLAIN_SHORT)
        or any(b == "key" and a in _KEY_KINDS for a, b in itertools.pairwise(parts))
        or (last in ("key", "keys") and before not in _PLAIN_KEYS)
        or (last == "token" and before not in _PLAIN_TOKENS)
        or (last.endswith("token") and last not in _PLAIN_TOKEN_WORDS)
        or (last.endswith(_LAST) and last not in _NOT_LAST and before not in _SWITCHES)
    )


def is_secret(name: str, value: Any) -> bool:
    """Return whether a value must not be written down: because of its name, or because it is or
    contains an address with a password or token, ``scheme://user:password@host?token=…``."""
    if isinstance(value, (list, tuple)):
        return any(is_secret(name, item) for item in value)
    if not isinstance(value, str) or not value:
        return False
    return is_secret_name(name) or without_passwords(value) != value


def without_passwords(text: str) -> str:
    """A text in which the passwords of addresses are hidden, and of their queries, of headers
    ``Authorization: …`` and of all pairs ``name=value`` what lets one in: tokens, keys and
    signatures, as in ``https://host/data?sig=…`` and ``AccountName=me;AccountKey=…``."""
    hidden = _PASSWORD.sub(rf"\g<user>{HIDDEN}@", text)
    hidden = _HEADER.sub(rf"\g<upto>{HIDDEN}", hidden)
    hidden = _QUERY.sub(lambda query: _PARAMETER.sub(_without_value, query[0]), hidden)
    return _PAIR.sub(_without_value, hidden)


def _without_value(parameter: re.Match[str]) -> str:
    name = parameter["name"]
    words = [word.lower() for word in _WORDS.findall(name)]
    secret = is_secret_name(name) or (bool(words) and words[-1] in _IN_PAIRS)
    return f"{parameter['upto']}{HIDDEN}" if secret else parameter[0]


def redact(data: Mapping[Any, Any]) -> dict[Any, Any]:
    """A copy of nested plain data in which the values of secret names are hidden, and passwords and
    tokens of addresses everywhere."""
    return {key: _redacted(value, is_secret_name(str(key))) for key, value in data.items()}


def redact_overrides(overrides: Iterable[str]) -> list[str]:
    """Hydra overrides without their secrets; those that hold none stay as they were typed."""
    return [_redacted_override(text) for text in overrides]


def _redacted_override(text: str) -> str:
    key, _, value = text.partition("=")
    if not value:
        return text
    if any(is_secret_name(part) for part in key.split(".")):
        return f"{key}={HIDDEN}"
    if value[0] not in "[{":
        return f"{key}={without_passwords(value)}"
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        data = OverridesParser.create().parse_override(text).value()
    except HydraException:
        return f"{key}={HIDDEN}"  # nobody knows what is in it
    hidden = _redacted(data, False)
    return text if hidden == data else f"{key}={json.dumps(hidden, ensure_ascii=False)}"


def _redacted(value: Any, secret: bool) -> Any:
    if isinstance(value, Mapping):
        return {k: _redacted(v, secret or is_secret_name(str(k))) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redacted(item, secret) for item in value]
    if secret and value not in (None, ""):
        return HIDDEN
    return without_passwords(value) if isinstance(value, str) else value
