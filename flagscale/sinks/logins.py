"""Removal of logins from addresses, which messages and files must not contain."""

from __future__ import annotations

import re

_LOGIN = re.compile(r"://[^/\s]*@")


def remove_logins(text: str) -> str:
    """Return a text without ``user:password@`` in its URLs."""
    return _LOGIN.sub("://", text)
