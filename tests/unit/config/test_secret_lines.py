"""Tests of the hiding of secrets in source code and diffs."""

from __future__ import annotations

import pytest

from flagscale.config.secret_lines import (
    hide_secrets_of_diff,
    hide_secrets_of_line,
    is_secret_file,
)


@pytest.mark.parametrize(
    ("line", "suffix", "expected"),
    [
        ('api_key = "abc"', ".py", "api_key = <hidden>"),
        ("self.password='a b'  # why", ".py", "self.password=<hidden>  # why"),
        ('login(token="abc", x=1)', ".py", "login(token=<hidden>, x=1)"),
        ('{"api_key": "a\\"bc", "x": "y"}', ".py", '{"api_key": <hidden>, "x": "y"}'),
        ("DB_PASSWORD: str = 'x'", ".py", "DB_PASSWORD: str = <hidden>"),
        ("key = self.k_proj(x)", ".py", "key = self.k_proj(x)"),
        ("attention(query, key=key, value=value)", ".py", "attention(query, key=key, value=value)"),
        ('token = os.environ["HF_TOKEN"]', ".py", 'token = os.environ["HF_TOKEN"]'),
        ('eos_token = "</s>"', ".py", 'eos_token = "</s>"'),
        ('password = ""', ".py", 'password = ""'),
        ("hf = 'hf_abcdefghijklmnopqrstuvwxyz'", ".py", "hf = '<hidden>'"),
        ("x = ghp_0123456789abcdefghijABCDEF", ".py", "x = <hidden>"),
        ("url = 'https://me:pw@host/x'", ".py", "url = 'https://me:<hidden>@host/x'"),
        (
            "curl -H 'Authorization: Bearer abc'",
            ".sh",
            "curl -H 'Authorization: <hidden> <hidden>'",
        ),
        ("export WANDB_API_KEY=abc", ".sh", "export WANDB_API_KEY=<hidden>"),
        ("  password: abc", ".yaml", "  password: <hidden>"),
        ("  tokenizer_path: /a/b", ".yaml", "  tokenizer_path: /a/b"),
        ("password: null", ".yaml", "password: null"),
        ('"webhook": "https://x/y",', ".json", '"webhook": <hidden>,'),
    ],
)
def test_secrets_of_a_line(line: str, suffix: str, expected: str) -> None:
    assert hide_secrets_of_line(line, suffix) == expected


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        *((name, True) for name in ("a/.env", ".env.prod", "id_rsa", "x/server.PEM", ".netrc")),
        *((n, True) for n in ("secrets.yaml", "api_keys.json", "credentials", "password.txt")),
        *((name, False) for name in ("token.py", "env.py", "train.yaml", "README", "monkey.txt")),
    ],
)  # fmt: skip
def test_files_with_secrets(name: str, secret: bool) -> None:
    assert is_secret_file(name) == secret


def test_secrets_of_a_diff() -> None:
    """Files with secrets are left out, private keys are hidden to their end, and the lines of Git
    itself stay.
    """
    key = ["-----BEGIN RSA PRIVATE KEY-----", "MIIEabc", "-----END RSA PRIVATE KEY-----"]
    diff = "\n".join(
        [
            "diff --git a/x/.env b/x/.env",
            "index 1..2 100644",
            "@@ -1 +1 @@",
            "-old",
            "+hunter2",
            "diff --git a/a b.py b/a b.py",
            "--- a/a b.py",
            "+++ b/a b.py",
            "@@ -1,2 +1,5 @@ class Key",
            " x = 1",
            *(f"+{line}" for line in key),
            "+y = 2",
            "-secret_key = 'a'",
            "",
        ]
    )
    assert hide_secrets_of_diff(diff).splitlines() == [
        "diff --git a/x/.env b/x/.env",
        "# left out: the name is that of a file with secrets",
        "diff --git a/a b.py b/a b.py",
        "--- a/a b.py",
        "+++ b/a b.py",
        "@@ -1,2 +1,5 @@ class Key",
        " x = 1",
        "+<hidden>",
        "+<hidden>",
        "+<hidden>",
        "+y = 2",
        "-secret_key = <hidden>",
    ]


@pytest.mark.parametrize(
    ("line", "hidden"),
    [
        pytest.param("+\fpassword = 'a'", "+\fpassword = <hidden>", id="form feed"),
        pytest.param("+x\rpassword = 'a'", "+x\rpassword = <hidden>", id="carriage return"),
        pytest.param("--- password = 'a'", "--- password = <hidden>", id="removed SQL comment"),
        pytest.param("+++ password = 'a'", "+++ password = <hidden>", id="added line with ++"),
    ],
)
def test_a_changed_line_is_hidden_whatever_it_begins_with(line: str, hidden: str) -> None:
    header = "diff --git a/x.sql b/x.sql\n--- a/x.sql\n+++ b/x.sql\n@@ -1 +1 @@\n"
    assert hide_secrets_of_diff(f"{header}{line}\n") == f"{header}{hidden}\n"
