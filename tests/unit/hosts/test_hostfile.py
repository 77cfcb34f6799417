from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.errors import ConfigError
from flagscale.hosts.hostfile import (
    Host,
    choose_hosts,
    is_this_machine,
    parse_host_list,
    parse_hostfile,
    read_hostfile,
    smallest_limit,
)
from flagscale.hosts.names import compress_consecutive, compress_names, expand_list, expand_pattern


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("h0 slots=8", [Host("h0", 8)], id="plain"),
        pytest.param("  h0\tslots=8  # eight\n\n# all\n", [Host("h0", 8)], id="comments"),
        pytest.param(
            "h0 slots=8 type=A800\nh1 type=BI slots=2",
            [Host("h0", 8, "A800"), Host("h1", 2, "BI")],
            id="types",
        ),
        pytest.param("10.0.0.1 slots=1", [Host("10.0.0.1", 1)], id="address"),
        pytest.param("h0 slots=1 via=ssh", [Host("h0", 1, via="ssh")], id="via"),
        pytest.param("fe80::1 slots=1", [Host("fe80::1", 1)], id="ipv6"),
        pytest.param("\ufeffh0 slots=8", [Host("h0", 8)], id="byte-order-mark"),
        pytest.param("a.b-c_d.example slots=1\r\n", [Host("a.b-c_d.example", 1)], id="crlf"),
    ],
)
def test_hostfile(text: str, expected: list[Host]) -> None:
    assert list(parse_hostfile(text)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "hosts.txt: no host in it", id="empty"),
        pytest.param("# only words\n\n", "hosts.txt: no host in it", id="only-comments"),
        pytest.param("h0 slots=8\ninvalid line", "hosts.txt:2: 'line' is not", id="invalid-line"),
        pytest.param("h0", "hosts.txt:1: slots is missing", id="no-slots"),
        pytest.param("h0 slots=8 garbage", "hosts.txt:1: 'garbage' is not", id="garbage-after"),
        pytest.param("h0 slots=0", "hosts.txt:1: slots=0: expected", id="zero"),
        pytest.param("h0 slots=-1", "slots=-1: expected", id="negative"),
        pytest.param("h0 slots=8type=A", "slots=8type=A: expected", id="run-together"),
        pytest.param("h0 slots=\u0664", "slots=\u0664: expected", id="external-digit"),
        pytest.param("h0 slots=2 slots=4", "slots is given twice", id="slots-twice"),
        pytest.param("h0 slots=2\nh0 slots=2", "hosts.txt:2: host 'h0' is named twice", id="twice"),
        pytest.param(
            "H00 slots=2\nh00 slots=2",
            "hosts.txt:2: host 'h00' is named twice: 'H00' is the same name",
            id="twice-for-dns",
        ),
        pytest.param(
            "h0 slots=1 addr=A\nh1 slots=1 addr=a", "addr=a is already the address of h0", id="addr"
        ),
        pytest.param("me@h[0-1] slots=2", "write h[0-1] user=me", id="user"),
        pytest.param("h$0 slots=2", "'h$0' is not a host name", id="host-name"),
        pytest.param("-oProxyCommand=x slots=2", "is not a host name", id="option-as-host"),
        pytest.param("h0 slots=2 via=ftp", "via=ftp: no way to reach a host is called", id="via"),
        pytest.param("h0 slots=2 type=a;b", "type=a;b: expected a word", id="type"),
        pytest.param("h0 slots=1 type=A\nh1 slots=1", "without one: h1", id="mixed-types"),
    ],
)
def test_bad_hostfile_is_rejected(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_hostfile(text, "hosts.txt")
    assert message in str(raised.value)


def test_all_bad_lines_are_reported() -> None:
    with pytest.raises(ConfigError) as raised:
        parse_hostfile("a slots=x\nb slots=1\nc", "f")
    assert [problem.where for problem in raised.value.problems] == ["f:1", "f:3"]


@given(st.text())
def test_any_text_is_parsed_or_rejected(text: str) -> None:
    try:
        hosts = parse_hostfile(text)
    except ConfigError as error:
        assert error.problems
    else:
        assert all(host.slots is not None and host.slots > 0 for host in hosts)


def test_missing_hostfile_is_an_error_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "no such"
    with pytest.raises(ConfigError) as raised:
        read_hostfile(path)
    assert str(path) in str(raised.value)
    assert raised.value.exit_code == 2


def test_binary_hostfile_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(b"\xff\xfe\x00h0")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_hostfile(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_hostfile(tmp_path)


@pytest.mark.parametrize(
    ("hostfile", "yaml", "expected"),
    [(8, None, 8), (None, 4, 4), (8, 2, 2), (2, 8, 2), (None, None, 1)],
)
def test_count_nodes(hostfile: int | None, yaml: int | None, expected: int) -> None:
    assert smallest_limit(hostfile, yaml) == expected


@pytest.mark.parametrize(
    ("slots", "yaml", "visible", "expected"),
    [
        (8, 4, 2, 2),
        (8, None, 4, 4),
        (None, 8, 4, 4),
        (None, None, None, 1),
        (None, 4, None, 4),
        (2, 8, None, 2),
    ],
)
def test_smallest_limit_counts(
    slots: int | None, yaml: int | None, visible: int | None, expected: int
) -> None:
    assert smallest_limit(slots, yaml, visible) == expected


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "127.0.0.53", socket.gethostname()])
def test_names_of_this_machine(name: str) -> None:
    assert is_this_machine(name)


@pytest.mark.parametrize("name", ["192.0.2.1", "no-such-host.invalid"])
def test_names_of_other_machines(name: str) -> None:
    assert not is_this_machine(name)


def test_choose_this_machine(tmp_path: Path) -> None:
    assert choose_hosts(None, None, None) == (Host("localhost"),)
    path = tmp_path / "hosts"
    path.write_text("127.0.0.1 slots=2 type=CPU\nlocalhost slots=2 type=CPU\n", encoding="utf-8")
    hosts = read_hostfile(path)
    assert choose_hosts(hosts, path, 1) == (Host("127.0.0.1", 2, "CPU"),)
    with pytest.raises(ConfigError, match="are this machine"):
        choose_hosts(hosts, path, None)


def test_other_hosts_need_ssh_and_a_name(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("localhost slots=1\n198.51.100.[1-3] slots=1\n", encoding="utf-8")
    hosts = read_hostfile(path)
    with pytest.raises(ConfigError, match=r"198\.51\.100\.\[1-3\]") as raised:
        choose_hosts(hosts, path, None, "local")
    assert "type: ssh" in str(raised.value)
    assert len(choose_hosts(hosts, path, None)) == 4
    with pytest.raises(ConfigError, match="no hostfile"):
        choose_hosts(None, None, 4)


def test_a_line_with_everything() -> None:
    (first, second) = parse_hostfile(
        "node[08-09] slots=8 type=A800 port=2222 user=me addr=10.0.0.[1-2] proxy=me@gate:22"
    )
    assert first == Host("node08", 8, "A800", 2222, "me", "10.0.0.1", "me@gate:22")
    assert (second.name, second.addr) == ("node09", "10.0.0.2")


def test_of_thousands_of_problems_the_first_are_shown_with_a_count() -> None:
    text = "".join(f"h{n} slots=0\n" for n in range(3000))
    with pytest.raises(ConfigError) as raised:
        parse_hostfile(text)
    lines = str(raised.value).splitlines()
    assert lines[0].startswith("hostfile:1: slots=0")
    assert lines[50:] == ["and 2950 more problems"]
    assert len(raised.value.problems) == 3000


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("h[1-3]", ["h1", "h2", "h3"]),
        ("h[08-10,20].x", ["h08.x", "h09.x", "h10.x", "h20.x"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("plain", ["plain"]),
    ],
)
def test_expand_and_compress(pattern: str, names: list[str]) -> None:
    assert expand_pattern(pattern) == names
    assert [
        name for part in _parts(compress_names(names)) for name in expand_pattern(part)
    ] == names
    assert expand_list(compress_names(names)) == names
    assert [name for part in compress_consecutive(names) for name in expand_pattern(part)] == names


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a1", "a2", "a4", "b", "a3"], ["a[1-2]", "a4", "b", "a3"]),
        (["b1", "a1", "b2"], ["b1", "a1", "b2"]),
        (["n08", "n09", "n10"], ["n[08-10]"]),
        (["n98", "n99", "n100"], ["n[98-100]"]),
        (["n08", "n09", "n10", "n11", "n012"], ["n[08-11]", "n012"]),
        (["n0", "n1"], ["n[0-1]"]),
        (["n0", *(f"n{n}" for n in range(1, 11))], ["n[0-9]", "n10"]),
        (["n099", "n100"], ["n[099-100]"]),
        (
            ["n999999999", "n1000000000", "n1000000001"],
            ["n999999999", "n1000000000", "n1000000001"],
        ),
        ([f"h{n}" for n in range(20000)], ["h[0-9]", "h[10-16393]", "h[16394-19999]"]),
    ],
)
def test_ranges_keep_the_order(names: list[str], expected: list[str]) -> None:
    assert compress_consecutive(names) == expected
    assert [name for part in expected for name in expand_pattern(part)] == names


NAMES = st.from_regex(r"[a-z]{1,2}[0-9]{0,3}[a-z]?", fullmatch=True)


@given(st.lists(NAMES | st.integers(0, 120).map("n{:02}".format), max_size=20, unique=True))
def test_ranges_round_trip(names: list[str]) -> None:
    assert [name for part in compress_consecutive(names) for name in expand_pattern(part)] == names


def _parts(folded: str) -> list[str]:
    """Return the patterns of a compressed list; commas inside brackets do not separate."""
    return re.split(r",(?![^\[]*\])", folded)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a1", "a2", "a4", "b"], "a[1-2,4],b"),
        (["n08", "n09", "n10", "n11"], "n[08-11]"),
        (["n9", "n10"], "n[9-10]"),
        (["10.0.0.1", "10.0.0.2"], "10.0.0.[1-2]"),
        (["x"], "x"),
        ([], ""),
    ],
)
def test_names_are_compressed_to_ranges(names: list[str], expected: str) -> None:
    assert compress_names(names) == expected


@given(
    st.lists(st.from_regex(r"[a-z]{1,2}[0-9]{0,3}[a-z]?", fullmatch=True), min_size=1, max_size=20)
)
def test_compress_round_trips(names: list[str]) -> None:
    expanded_names = [
        name for part in _parts(compress_names(names)) for name in expand_pattern(part)
    ]
    assert sorted(expanded_names) == sorted(set(names))


@pytest.mark.parametrize(
    "pattern", ["h[", "h[1-", "h]1", "h[a]", "h[3-1]", "h[1-003]", "h[]", "h[0-99999]", "h[1--2]"]
)
def test_bad_ranges_are_rejected(pattern: str) -> None:
    with pytest.raises(ConfigError, match="f:1"):
        parse_hostfile(f"{pattern} slots=1", "f")


def test_host_list_needs_no_slots() -> None:
    hosts = parse_host_list(["a", "node[1-2] slots=4 user=me"])
    assert [(host.name, host.slots, host.user) for host in hosts] == [
        ("a", None, None),
        ("node1", 4, "me"),
        ("node2", 4, "me"),
    ]


def test_host_list_reports_every_problem_with_its_key() -> None:
    with pytest.raises(ConfigError) as error:
        parse_host_list(["a", "a", "me@b"], "x.yaml:3")
    assert [(p.key, p.where) for p in error.value.problems] == [
        ("experiment.runner.hosts", "x.yaml:3")
    ] * 2
    assert "write b user=me" in str(error.value)
