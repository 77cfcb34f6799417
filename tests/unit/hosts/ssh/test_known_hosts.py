"""Tests of the known_hosts parser and of host key checks."""

from __future__ import annotations

import base64
import hmac
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.hosts.ssh.known_hosts import (
    HostKeyStatus,
    check_host_key,
    list_trusted_kinds,
    lookup_keys,
    parse_known_hosts,
    read_known_hosts,
)

KEY, OTHER = b"key", b"other"
ED, RSA = "ssh-ed25519", "ssh-rsa"


def encode_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def hash_name(name: str) -> str:
    salt = b"s" * 20
    return f"|1|{encode_base64(salt)}|{encode_base64(hmac.digest(salt, name.encode(), 'sha1'))}"


@pytest.mark.parametrize(
    ("names", "name", "is_known"),
    [
        ("node", "node", True),
        ("node,10.0.0.1", "10.0.0.1", True),
        ("Node", "node", True),
        ("node", "node2", False),
        ("[node]:2222", "[node]:2222", True),
        ("[node]:2222", "node", False),
        ("node*.example", "node7.example", True),
        ("node?.example", "node77.example", False),
        ("*,!bad", "good", True),
        ("*,!bad", "bad", False),
        ("[n*]:2222", "[n1]:2222", True),
        (hash_name("node"), "node", True),
        (hash_name("node"), "nodes", False),
        ("|1|broken", "node", False),
    ],
)
def test_lines_match_hosts(names: str, name: str, is_known: bool) -> None:
    keys = parse_known_hosts(
        f"# comment\n\n{names} {ED} {encode_base64(KEY)} a comment\n", "f"
    ).find_keys(name)
    assert [key.location for key in keys] == (["f:3"] if is_known else [])


@pytest.mark.parametrize(
    ("lines", "verdict", "line"),
    [
        pytest.param([], HostKeyStatus.UNKNOWN, None, id="empty"),
        pytest.param([f"h {ED} {encode_base64(KEY)}"], HostKeyStatus.KNOWN, "f:1", id="known"),
        pytest.param(
            [f"h {ED} {encode_base64(OTHER)}"], HostKeyStatus.CHANGED, "f:1", id="changed"
        ),
        pytest.param(
            [f"h {ED} {encode_base64(OTHER)}", f"h {ED} {encode_base64(KEY)}"],
            HostKeyStatus.KNOWN,
            "f:2",
            id="two-keys",
        ),
        pytest.param(
            [f"h {RSA} {encode_base64(OTHER)}"],
            HostKeyStatus.UNKNOWN,
            "f:1",
            id="only-another-type",
        ),
        pytest.param(
            [f"h {ED} {encode_base64(KEY)}", f"@revoked * {ED} {encode_base64(KEY)}"],
            HostKeyStatus.REVOKED,
            "f:2",
            id="revoked",
        ),
        pytest.param(
            [f"@cert-authority * {ED} {encode_base64(KEY)}"],
            HostKeyStatus.UNKNOWN,
            "f:1",
            id="authority",
        ),
        pytest.param([f"h {ED} not*base64"], HostKeyStatus.CHANGED, "f:1", id="damaged"),
    ],
)
def test_host_key_status(lines: list[str], verdict: HostKeyStatus, line: str | None) -> None:
    keys = parse_known_hosts("\n".join(lines), "f").find_keys("h")
    decided, deciding_line_number = check_host_key(keys, ED, KEY)
    assert (decided, deciding_line_number.location if deciding_line_number else None) == (
        verdict,
        line,
    )


def test_files_are_read_again_after_a_change(tmp_path: Path) -> None:
    path, missing_path = tmp_path / "known_hosts", tmp_path / "none"
    assert lookup_keys([path, missing_path], "h") == []
    path.write_text(f"h {RSA} {encode_base64(OTHER)}\n")
    assert list_trusted_kinds(lookup_keys([path, missing_path], "h")) == [RSA]
    assert read_known_hosts(path) is read_known_hosts(path)
    with path.open("a") as file:
        file.write(f"h {ED} {encode_base64(KEY)}\nh {ED} {encode_base64(OTHER)}\n")
    assert list_trusted_kinds(lookup_keys([path, missing_path], "h")) == [RSA, ED]


@given(st.text())
def test_parser_accepts_any_text(text: str) -> None:
    for key in parse_known_hosts(text, "f").find_keys("h"):
        assert key.matches(KEY) in (True, False)
