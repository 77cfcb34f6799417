"""What every page has around its content: style, script, title, the switch of light and dark.

A page loads nothing, and its policy keeps it so: it runs the one script that is known by its
digest, whatever got into its text.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path

from flagscale.report.html import Html, element, join

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
    "base-uri 'none'; form-action 'none'"
)


def page(title: str, *content: object, note: object = "") -> str:
    """A whole page. ``note`` stands below the title: when it was made, of what."""
    script = _beside("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = _POLICY.format(digest=digest)
    head = (
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        element("title", title),
        f"<style>{_beside('page.css')}</style>",
    )
    # Hidden until the script, without which it would do nothing, shows it.
    switch = element("button", "light or dark", id="theme", type="button", hidden=True)
    header = element("header", element("h1", title), switch, element("p", note))
    body = (header, element("main", join(content)), Html(f"<script>{script}</script>"))
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"><head>{"".join(head)}</head>',
            f"<body>{join(body)}</body></html>",
            "",
        ]
    )


@cache
def _beside(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
