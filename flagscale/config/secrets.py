"""Detection and hiding of secrets by their names and values, so that they are never written down.

Used wherever a configuration, an environment or a log line is stored or shown.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

HIDDEN = "<hidden>"

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+|[0-9]+")
_SECRET_WORDS = (
    "secret",
    "secrets",
    "password",
    "passwords",
    "passwd",
    "passphrase",
    "credential",
    "credentials",
    "webhook",
    "webhooks",
    "apikey",
    "privkey",
    "privatekey",
    "secretkey",
    "accesskey",
    "sshkey",
)
"""A name is secret if any of its words ends in one of these, as in ``PGPASSWORD``."""
_SECRET_LAST_WORDS = ("auth", "authorization", "bearer", "cookie", "cookies", "jwt", "pass", "pwd")
"""A name is secret if its last word ends in one of these, as in ``SSHPASS``."""
_HARMLESS_LAST_WORDS = frozenset(
    {
        "allpass",
        "askpass",
        "backwardpass",
        "bandpass",
        "bypass",
        "compass",
        "encompass",
        "firstpass",
        "forwardpass",
        "highpass",
        "lowpass",
        "multipass",
        "oldpwd",
        "onepass",
        "overpass",
        "pwd",
        "pass",
        "secondpass",
        "singlepass",
        "surpass",
        "twopass",
        "underpass",
    }
)
"""Words that end like those of ``_SECRET_LAST_WORDS`` and are harmless. ``pass`` and ``pwd`` have
rules of their own.
"""
_SETTING_WORDS = frozenset(
    {
        "allow",
        "disable",
        "enable",
        "has",
        "is",
        "no",
        "require",
        "requires",
        "skip",
        "use",
        "uses",
        "with",
        "without",
    }
)
_SHORT_SECRET_WORDS = frozenset({"pass", "pat", "pwd"})
_HARMLESS_SHORT_NAMES = frozenset(
    {("pwd",), ("old", "pwd"), ("forward", "pass"), ("backward", "pass")}
)
_URL_PASSWORD = re.compile(r"(?P<user>[A-Za-z0-9+.\-]://[^/?#\s:@]*:)[^/?#\s]+@")
"""Password of a URL, from the last character of the scheme: the whole scheme would be tried at
every character of a long word, in quadratic time.
"""
_URL_QUERY = re.compile(r"(?<=://)[^\s?#]*[?#]\S+")
_QUERY_PARAMETER = re.compile(
    r"(?P<upto>[?&;#](?P<name>[^=&;#?\s]+)=)(?:[^&;#\s]|;(?![^=&;#?\s]+=))+"
)
_AUTHORIZATION_HEADER = re.compile(
    r"(?P<upto>\bauthorization\s*:\s*(?:\w+\s+)?)[^\s'\"]+", re.IGNORECASE
)
_NAME_VALUE_PAIR = re.compile(
    r"""(?<![^\s;,"'({\[])(?P<upto>(?P<name>[A-Za-z_\-][\w.\-]*)\s*=\s*)"""
    r"""(?:"[^"]*"|'[^']*'|[^;\s]+(?:[^\S\n]+[^;=\s]+)*(?=\s*(?:;|$))|[^;\s]+)"""
)
"""``name=value`` in a text, as in the connection string of a database. A value has spaces only up
to a semicolon or the end.
"""
_CHAT_WORDS = frozenset(
    {
        *("alert", "alerts", "chat", "notify"),
        *("dingtalk", "discord", "feishu", "lark", "mattermost", "slack", "teams", "wecom"),
    }
)
"""A name with one of these before ``hook`` is that of a webhook, as in ``SLACK_HOOK``."""
_SECRET_PARAMETERS = frozenset({"sig", "signature", "pwd"})
_SECRET_KEY_WORDS = frozenset({"access", "api", "auth", "encryption", "private", "signing", "ssh"})
_HARMLESS_KEY_WORDS = frozenset({"foreign", "json", "primary", "public", "query", "sort", "text"})
_HARMLESS_TOKEN_WORDS = frozenset(
    {
        "begin",
        "bos",
        "cls",
        "end",
        "eod",
        "eos",
        "extra",
        "first",
        "image",
        "last",
        "mask",
        "next",
        "pad",
        "padding",
        "per",
        "sep",
        "special",
        "start",
        "stop",
        "unk",
        "unknown",
    }
)
_HARMLESS_TOKEN_NAMES = frozenset(
    f"{kind}token" for kind in (*_HARMLESS_TOKEN_WORDS, "de", "sub", "")
)
"""Words that end in ``token`` and are harmless. ``token`` alone has a rule of its own."""


def is_secret_name(name: str) -> bool:
    """Return True if the name of a variable or key suggests a secret.

    Secret: ``HF_TOKEN``, ``WANDB_API_KEY``, ``AWS_SECRET_ACCESS_KEY``, ``DB_PASSWORD``,
    ``SSHPASS``, ``MYAUTH``, ``GIT_PAT``. Not secret: words of language models (``eod_token``,
    ``tokenizer_path``, ``tokens_per_second``), the shell's ``PWD``, settings of authentication
    (``AUTH_TYPE``, ``USE_JWT``) and ``AUTHOR``.
    """
    parts = [part.lower() for part in _WORDS.findall(name)]
    if not parts:
        return False
    second_last, last = parts[-2] if len(parts) > 1 else "", parts[-1]
    return (
        any(part.endswith(_SECRET_WORDS) for part in parts)
        or (not _SHORT_SECRET_WORDS.isdisjoint(parts) and tuple(parts) not in _HARMLESS_SHORT_NAMES)
        or any(b == "key" and a in _SECRET_KEY_WORDS for a, b in itertools.pairwise(parts))
        or any(b in ("hook", "hooks") and a in _CHAT_WORDS for a, b in itertools.pairwise(parts))
        or (last in ("key", "keys") and second_last not in _HARMLESS_KEY_WORDS)
        or (last == "token" and second_last not in _HARMLESS_TOKEN_WORDS)
        or (last.endswith("token") and last not in _HARMLESS_TOKEN_NAMES)
        or (
            last.endswith(_SECRET_LAST_WORDS)
            and last not in _HARMLESS_LAST_WORDS
            and second_last not in _SETTING_WORDS
        )
    )


def is_secret(name: str, value: Any) -> bool:
    """Return True if a value must not be written down, because of its name or because it contains a
    URL with a password or token, such as ``scheme://user:password@host?token=…``.
    """
    if isinstance(value, (list, tuple)):
        return any(is_secret(name, item) for item in value)
    if not isinstance(value, str) or not value:
        return False
    return is_secret_name(name) or hide_passwords(value) != value


def hide_passwords(text: str) -> str:
    """Return a text with its secrets hidden: passwords of URLs, ``Authorization:`` headers, and the
    values of secret names in the query of a URL or in pairs ``name=value``, as in
    ``https://host/data?sig=…`` and ``AccountName=me;AccountKey=…``.
    """
    return _NAME_VALUE_PAIR.sub(_hide_parameter_value, hide_url_passwords(text))


def hide_url_passwords(text: str) -> str:
    """Return a text with the passwords and secret parameters of its URLs, and the values of
    ``Authorization:`` headers, hidden.
    """
    hidden = _URL_PASSWORD.sub(rf"\g<user>{HIDDEN}@", text)
    hidden = _AUTHORIZATION_HEADER.sub(rf"\g<upto>{HIDDEN}", hidden)
    return _URL_QUERY.sub(
        lambda query: _QUERY_PARAMETER.sub(_hide_parameter_value, query[0]), hidden
    )


def _hide_parameter_value(parameter: re.Match[str]) -> str:
    name = parameter["name"]
    words = [word.lower() for word in _WORDS.findall(name)]
    secret = is_secret_name(name) or (bool(words) and words[-1] in _SECRET_PARAMETERS)
    return f"{parameter['upto']}{HIDDEN}" if secret else parameter[0]


def redact(data: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a copy of nested plain data with the values of secret names hidden, and the secrets in
    all other texts.
    """
    return {key: _redact_value(value, is_secret_name(str(key))) for key, value in data.items()}


def redact_overrides(overrides: Iterable[str]) -> list[str]:
    """Return Hydra overrides with their secrets hidden; those without any stay unchanged."""
    return [_redact_override(text) for text in overrides]


def _redact_override(text: str) -> str:
    key, _, value = text.partition("=")
    if not value:
        return text
    if any(is_secret_name(part) for part in key.split(".")):
        return f"{key}={HIDDEN}"
    if value[0] not in "[{":
        return f"{key}={hide_passwords(value)}"
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        data = OverridesParser.create().parse_override(text).value()
    except HydraException:
        return f"{key}={HIDDEN}"  # unreadable, so it may contain secrets
    hidden = _redact_value(data, False)
    return text if hidden == data else f"{key}={json.dumps(hidden, ensure_ascii=False)}"


def _redact_value(value: Any, secret: bool) -> Any:
    if isinstance(value, Mapping):
        return {k: _redact_value(v, secret or is_secret_name(str(k))) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redact_value(item, secret) for item in value]
    if secret and value not in (None, ""):
        return HIDDEN
    return hide_passwords(value) if isinstance(value, str) else value
