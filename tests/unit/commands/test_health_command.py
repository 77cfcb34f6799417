"""Tests of the command line of ``flagscale health``; tests/integration/hosts measures hosts."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from flagscale.commands.health import add_health_arguments, check_hosts_health, select_hosts
from flagscale.errors import ConfigError


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_health_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ((), ["localhost"]),
        (("--hosts", "a,b"), ["a", "b"]),
        (("--hosts", "node[01-03],b"), ["node01", "node02", "node03", "b"]),
        (("--hosts-file", "hosts"), ["x", "y"]),
    ],
)
def test_hosts(
    words: tuple[str, ...], names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("x slots=1\ny slots=1 addr=10.0.0.2\n", encoding="utf-8")
    assert [host.name for host in select_hosts(parse(*words))[1]] == names


@pytest.mark.parametrize(
    ("words", "rest", "message"),
    [
        (("--hosts", "a", "--hosts-file", "b"), [], "exclude each other"),
        (("--hosts", "a,a"), [], "a"),
        (("--hosts-file", "missing"), [], "no such file: missing"),
        (("--device", "tpu"), [], "--device: no kind of device is called 'tpu'"),
        ((), ["--ful"], "unknown argument --ful"),
    ],
)
def test_wrong_words(words: tuple[str, ...], rest: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_hosts_health(parse(*words), rest, lambda _result, path: path)
    assert message in str(error.value)
