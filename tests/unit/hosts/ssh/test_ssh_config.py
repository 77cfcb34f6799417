"""Tests of resolving hosts with the user's SSH configuration."""

from __future__ import annotations

import getpass
from pathlib import Path

import pytest

from flagscale.errors import ConfigError
from flagscale.hosts.ssh.ssh_config import SshConfig, SshTarget


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    (tmp_path / ".ssh").mkdir()
    return tmp_path


def config(home: Path, text: str) -> SshConfig:
    path = home / ".ssh" / "config"
    path.write_text(text)
    return SshConfig.load(path)


def route(target: SshTarget) -> list[str]:
    """Return the names of the hosts on the route, first one first."""
    hops = [f"{target.user}@{target.address}:{target.port}"]
    return hops if target.via is None else route(target.via) + hops


def test_without_a_configuration_a_name_is_its_own_address(home: Path) -> None:
    (home / ".ssh" / "id_rsa").write_text("key")
    target = SshConfig.from_lines([], "none").target("node-1")
    assert (target.address, target.port, target.user) == ("node-1", 22, getpass.getuser())
    assert target.identity_files == (home / ".ssh" / "id_rsa",)
    assert target.default_identities
    assert target.known_hosts[0] == home / ".ssh" / "known_hosts"
    assert not target.accept_new_host_keys
    assert (target.via, target.proxy_command, target.agent_socket) == (None, None, None)


def test_options_of_an_alias(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", "/run/agent")
    ssh_config = config(
        home,
        "# clusters\n"
        "Host gpu? !gpu9\n"
        "  HostName %h.cluster.example\n"
        "  Port = 2200\n"
        '  IdentityFile "~/.ssh/with space"\n'
        "  IdentityFile ~/.ssh/second\n"
        "  UserKnownHostsFile ~/.ssh/a %d/b\n"
        "  GlobalKnownHostsFile none\n"
        "  HostKeyAlias cluster\n"
        "  StrictHostKeyChecking accept-new\n"
        "  ConnectTimeout 7\n"
        "  IdentitiesOnly yes\n"
        "Match host gpu*.cluster.example\n"
        "  User trainer\n",
    )
    target = ssh_config.target("gpu1")
    assert target.address == "gpu1.cluster.example"
    assert (target.user, target.port, target.connect_timeout) == ("trainer", 2200, 7)
    assert target.identity_files == (home / ".ssh/with space", home / ".ssh/second")
    assert target.known_hosts == (home / ".ssh/a", home / "b")
    assert target.known_hosts_name == "cluster"
    assert target.accept_new_host_keys
    assert target.identities_only
    assert target.agent_socket == "/run/agent"
    other_target = ssh_config.target("gpu9")
    assert (other_target.address, other_target.known_hosts_name) == ("gpu9", "gpu9")


def test_arguments_take_precedence(home: Path) -> None:
    ssh_config = config(home, "Host *\n  User a\n  Port 1\n  ProxyJump gate\n  IdentityFile ~/x\n")
    target = ssh_config.target("n", user="b", port=2, proxy="none")
    assert (target.user, target.port, target.via) == ("b", 2, None)
    assert target.identity_files == (home / "x",)
    assert target.known_hosts_name == "[n]:2"


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        pytest.param("Host n\n ProxyJump g", "n", ["u@g:22", "u@n:22"], id="one"),
        pytest.param("Host n\n ProxyJump none", "n", ["u@n:22"], id="none"),
        pytest.param(
            "Host n\n ProxyJump a@g:7,h", "n", ["a@g:7", "u@h:22", "u@n:22"], id="chain-in-order"
        ),
        pytest.param(
            "Host n\n ProxyJump ssh://a@[fe80::1]:7", "n", ["a@fe80::1:7", "u@n:22"], id="ipv6"
        ),
        pytest.param(
            "Host n\n ProxyJump g\nHost g\n ProxyJump front\n HostName gate.example",
            "n",
            ["u@front:22", "u@gate.example:22", "u@n:22"],
            id="a-jump-host-behind-another",
        ),
        pytest.param("Host *\n ProxyJump g", "n", ["u@g:22", "u@n:22"], id="for-all-hosts"),
        pytest.param("Host *\n ProxyJump g", "g", ["u@g:22"], id="the-jump-host-itself"),
        pytest.param(
            "Host *\n ProxyJump g\nHost gg\n HostName g", "gg", ["u@g:22"], id="itself-by-alias"
        ),
    ],
)
def test_proxy_jump(home: Path, text: str, name: str, expected: list[str]) -> None:
    ssh_config = config(home, f"{text}\nHost *\n User u\n")
    assert route(ssh_config.target(name)) == expected


@pytest.mark.parametrize(
    ("match", "port"),
    [
        ("exec true", 3),
        ("exec false", 22),
        ("!exec false", 3),
        ('exec "test %h = n"', 3),
        ('exec "test %h = m"', 22),
        ("host other exec true", 22),
        ("host n exec cat", 3),  # its stdin is empty, not this process's
        ("originalhost n user nobody-at-all", 22),
        ("all", 3),
    ],
)
def test_match_block_applies_to_matching_hosts(home: Path, match: str, port: int) -> None:
    assert config(home, f"Match {match}\n  Port 3\n").target("n").port == port


def test_include_keeps_the_block_it_stands_in(home: Path) -> None:
    (home / ".ssh" / "conf.d").mkdir()
    (home / ".ssh" / "conf.d" / "one").write_text("Host one\n  Port 1\n")
    (home / ".ssh" / "conf.d" / "two").write_text("Host two\n  Port 2\n")
    ssh_config = config(home, "Host here\n  User me\n  Include conf.d/* ~/.ssh/none\n  Port 3\n")
    ports = {name: ssh_config.target(name).port for name in ("one", "two", "here", "other")}
    assert ports == {"one": 1, "two": 2, "here": 3, "other": 22}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("Host a\nnonsense\n", r"config:2: not an SSH setting: 'nonsense'", id="line"),
        pytest.param("Host n\n Port ssh\n", r"port: expected a number, found 'ssh'", id="port"),
        pytest.param("Host n\n ProxyJump a b\n", r"ProxyJump: 'a b' is not", id="jump"),
        pytest.param(
            "Host n\n ProxyJump a\nHost a\n ProxyJump b\nHost b\n ProxyJump a\n",
            r"forms a loop: n -> a -> b -> a",
            id="loop",
        ),
        pytest.param(
            "Host n\n ProxyJump h1\n"
            + "".join(f"Host h{number}\n ProxyJump h{number + 1}\n" for number in range(1, 12)),
            r"takes more than 8 jumps: n -> h1 -> h2",
            id="too-many-jumps",
        ),
        pytest.param("Include config\n", r"Include goes deeper than 16", id="endless-include"),
    ],
)
def test_invalid_configuration_is_rejected(home: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        config(home, text).target("n")
    assert caught.value.exit_code == 2


def test_a_named_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none does not exist"):
        SshConfig.load(tmp_path / "none")


@pytest.mark.parametrize(
    ("option", "expected"),
    [("SSH_AUTH_SOCK", "/env"), ("none", None), ("$OTHER", "/other"), ("/path", "/path")],
)
def test_identity_agent(
    home: Path, monkeypatch: pytest.MonkeyPatch, option: str, expected: str | None
) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", "/env")
    monkeypatch.setenv("OTHER", "/other")
    assert config(home, f"IdentityAgent {option}\n").target("n").agent_socket == expected
