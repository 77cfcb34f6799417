"""Hiding of secrets in source code and in diffs of it, line by line.

In contrast to :func:`flagscale.config.secrets.hide_passwords`, which reads values of settings, a
name such as ``key`` is not suspicious in the code of a model: only literals are hidden there.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from flagscale.config.secrets import HIDDEN, hide_url_passwords, is_secret_name

_SECRET_FILES = re.compile(
    r"\.env(\..*)?|.*\.env|[._]netrc|\.(pgpass|npmrc|pypirc|git-credentials|htpasswd|s3cfg|boto)"
    r"|id_(rsa|dsa|ecdsa|ed25519)|credentials|kubeconfig"
    r"|.*\.(pem|key|p12|pfx|jks|keystore|kdbx|asc|gpg)",
    re.IGNORECASE,
)
_SETTINGS_SUFFIXES = frozenset(
    {"", ".cfg", ".conf", ".csv", ".ini", ".json", ".properties", ".toml", ".txt", ".yaml", ".yml"}
)
_SHELL_SUFFIXES = frozenset({".bash", ".sh", ".zsh"})
_ASSIGNMENT = re.compile(
    r"""(?P<upto>(?P<quote>["']?)(?<![\w.\-])(?P<name>[A-Za-z_][\w.\-]*)(?P=quote)"""
    r"""(?:\s*:\s*\w+)?\s*(?:[:=]|=>)\s*)"""
    r"""(?P<value>[rbfu]?"(?:[^"\\]|\\.)*"|[rbfu]?'(?:[^'\\]|\\.)*'|[^\s,;#}\])]+)""",
    re.IGNORECASE,
)
_LITERAL_PREFIXES = ('"', "'", 'r"', "r'", 'b"', "b'", 'f"', "f'", 'u"', "u'")
_EMPTY_VALUES = frozenset({'""', "''", "null", "none", "~", "true", "false", "|", ">", "{", "["})
_KNOWN_TOKENS = re.compile(
    r"\b(?:gh[oprsu]_\w{20,}|github_pat_\w{20,}|glpat-[\w\-]{15,}|hf_[A-Za-z0-9]{20,}"
    r"|sk-[\w\-]{20,}|xox[abeprs]-[\w\-]{10,}|npm_\w{30,}|pypi-[\w\-]{30,}"
    r"|(?:AKIA|ASIA)[0-9A-Z]{16}|AIza[\w\-]{35}|eyJ[\w\-]{8,}\.[\w\-]{8,}\.[\w\-]*)"
)
_KEY_BEGIN, _KEY_END = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY"), "-----END"
_DIFF_HEADER = "diff --git "
_LINE_MARKS = ("+", "-", " ")


def is_secret_file(name: str) -> bool:
    """Return True if the name of a file suggests that it holds secrets, such as ``.env``,
    ``id_rsa``, ``server.pem`` and ``secrets.yaml``.
    """
    path = PurePosixPath(name)
    if _SECRET_FILES.fullmatch(path.name):
        return True
    return path.suffix.lower() in _SETTINGS_SUFFIXES and is_secret_name(path.stem)


def hide_secrets_of_diff(diff: str) -> str:
    """Return a Git diff without secrets.

    Contents of files with secrets are left out, and what looks like a secret in other lines is
    replaced by ``<hidden>``.
    """
    return "".join(_iter_public_lines(diff))


def _iter_public_lines(diff: str) -> Iterator[str]:
    suffix, is_left_out, in_key = "", False, False
    # Other characters at which str.splitlines() splits, such as form feeds, are parts of a line.
    for line in io.StringIO(diff, newline="\n"):
        if line.startswith(_DIFF_HEADER):
            name = line.rstrip("\n").rstrip('"').rpartition("/")[2]
            suffix, in_key = PurePosixPath(name).suffix.lower(), False
            is_left_out = is_secret_file(name)
            yield line
            if is_left_out:
                yield "# left out: the name is that of a file with secrets\n"
        elif is_left_out:
            continue
        elif _KEY_BEGIN.search(line) or in_key:
            in_key = _KEY_END not in line
            yield f"{line[:1]}{HIDDEN}\n"
        elif line.startswith(_LINE_MARKS):
            yield line[:1] + hide_secrets_of_line(line[1:], suffix)
        else:
            yield line


def hide_secrets_of_line(line: str, suffix: str) -> str:
    """Return a line of a file with this suffix, such as ``.py``, with its secrets hidden."""
    literals_only = suffix not in _SETTINGS_SUFFIXES and suffix not in _SHELL_SUFFIXES

    def hide_value(match: re.Match[str]) -> str:
        value = match["value"]
        if value.lower() in _EMPTY_VALUES or not is_secret_name(match["name"]):
            return match[0]
        if literals_only and not value.lower().startswith(_LITERAL_PREFIXES):
            return match[0]
        return f"{match['upto']}{HIDDEN}"

    hidden = _KNOWN_TOKENS.sub(HIDDEN, hide_url_passwords(line))
    return _ASSIGNMENT.sub(hide_value, hidden)
