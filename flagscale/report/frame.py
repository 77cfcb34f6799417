"""Frame of every page: style, script, title, and the switch between light and dark.

A page loads nothing. Its content security policy allows only the script with the known digest, so
text from outside cannot run anything.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path

from flagscale.report.html import Html, element, join_parts

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
    "base-uri 'none'; form-action 'none'"
)


def render_page(title: str, *content: object, note: object = "") -> str:
    """Return a whole page. ``note`` below the title states its time and subject."""
    script = _read_asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = _POLICY.format(digest=digest)
    head = (
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        element("title", title),
        f"<style>{_read_asset('page.css')}</style>",
    )
    # Hidden until the script, which implements it, shows it.
    switch = element("button", "light or dark", id="theme", type="button", hidden=True)
    header = element("header", element("h1", title), switch, element("p", note))
    body = (header, element("main", join_parts(content)), Html(f"<script>{script}</script>"))
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"><head>{"".join(head)}</head>',
            f"<body>{join_parts(body)}</body></html>",
            "",
        ]
    )


@cache
def _read_asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
