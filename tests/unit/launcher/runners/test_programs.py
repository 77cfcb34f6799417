"""The programs that hosts run for an action: checked by shellcheck, run by this machine's bash."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.config.schema import Commands, Environments, Runner
from flagscale.hosts import facts, probe
from flagscale.hosts.facts import ModuleQuestion, Need, Question
from flagscale.hosts.hostfile import Host
from flagscale.hosts.program import END, PROGRAMS, Answer, Piece, parse, source
from flagscale.launcher.planning.model import LaunchPlan, Machine
from flagscale.launcher.planning.script import render
from flagscale.launcher.runners.programs import code, look, start, stop
from flagscale.launcher.runners.programs.look import ProbeRequest
from flagscale.launcher.state import RunState, state_of

HOSTILE = "a 'b' \"c\" $d `e` $(f)\n;g"
MakePlan = Callable[..., LaunchPlan]
TWO = (Host("h0", 2), Host("h1", 2, addr="10.0.0.2"))
UNASKED = Machine("/opt/python", Path("/opt/fs"), Path("/work dir"), cpus=None, devices=None)


def shellcheck() -> str:
    beside = Path(sys.executable).with_name("shellcheck")
    return str(beside) if beside.exists() else shutil.which("shellcheck") or "shellcheck"


@pytest.fixture
def state(make_plan: MakePlan) -> RunState:
    return state_of(make_plan(hosts=TWO, exp_dir=Path(f"/data/{HOSTILE}")))


def programs(make_plan: MakePlan, state: RunState) -> dict[str, str]:
    plan = make_plan(hosts=TWO, exp_dir=Path(f"/data/{HOSTILE}"))
    host = plan.hosts[1]
    asked = ModuleQuestion(HOSTILE, "m", [HOSTILE], HOSTILE, {"A": [HOSTILE]})
    need = Need(
        HOSTILE, HOSTILE, [HOSTILE], [HOSTILE], HOSTILE, compared=True, asked=[asked],
        asked_of_checkpoints=[asked, asked],
    )  # fmt: skip
    question = Question(HOSTILE, HOSTILE, HOSTILE, HOSTILE, port=0, need=need)
    everything = ProbeRequest(fetch=True, output=True, count=True, last_line=True)
    return {
        "facts": facts.text(question),
        "start": start.text(host, plan.run_id, {host.script: HOSTILE}, previous=state.hosts[1]),
        "look": look.text(state, state.hosts[1], everything),
        "stop": stop.text(state, state.hosts[1]),
        "unprobed": render(
            make_plan(hosts=TWO, machine=UNASKED), make_plan(hosts=TWO, machine=UNASKED).hosts[1]
        ),
    }


@pytest.mark.parametrize("name", ["facts", "start", "look", "stop", "unprobed"])
def test_shellcheck_finds_nothing(
    name: str, make_plan: MakePlan, state: RunState, tmp_path: Path
) -> None:
    path = tmp_path / f"{name}.sh"
    # Values are literal; functions are called by name, variables used by what follows.
    spared = ["--exclude=SC2016,SC2317,SC2329,SC2034,SC2154", "--severity=warning"]
    path.write_text("#!/usr/bin/env bash\n" + programs(make_plan, state)[name], encoding="utf-8")
    words = [shellcheck(), *spared, str(path)]
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    assert found.stdout == ""
    assert found.returncode == 0


def test_an_unasked_host_looks_for_itself(make_plan: MakePlan, tmp_path: Path) -> None:
    given = {"envs": Environments({"NCCL_NVLS_ENABLE": "1"}), "cmds": Commands("export MINE=yes")}
    plan = make_plan(
        hosts=(Host("localhost", 2), Host("h1", 2)),
        machine=replace(UNASKED, workdir=tmp_path),
        exp_dir=tmp_path / "exp",
        **given,
    )
    head = render(plan, plan.hosts[0]).partition("phase=before_start")[0]
    show = 'set +u -e; eval "$before_start"; env'
    done = subprocess.run(
        ["bash", "-c", f"{head}\n{show}"], capture_output=True, text=True, check=True
    )
    found = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert int(found["OMP_NUM_THREADS"]) >= 1
    assert found["MINE"] == "yes"
    assert found["NCCL_NVLS_ENABLE"] == "1" or "TORCHDYNAMO_DISABLE" in found


def ask(question: Question, home: Path, **variables: str) -> Answer:
    """What this machine answers, with a home directory of its own."""
    done = subprocess.run(
        ["bash", "-c", facts.text(question)],
        env={**os.environ, "HOME": str(home), **variables},
        capture_output=True,
        check=True,
    )
    assert done.stderr == b""
    return parse(done.stdout)


# Every program for hosts, wherever it lies.
FILES = sorted(Path(facts.__file__).parents[1].rglob("*.sh"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_shellcheck_reads_every_program_alone(path: Path) -> None:
    found = subprocess.run(
        [shellcheck(), "--severity=warning", str(path)], capture_output=True, text=True, check=False
    )
    assert (found.stdout, found.returncode) == ("", 0)


@pytest.mark.torch
def test_facts_of_this_machine(tmp_path: Path) -> None:
    need = Need(str(tmp_path), str(tmp_path / "a/b"), ["/", "/no such"], fresh=True)
    question = Question("127.0.0.1", str(tmp_path), sys.executable, port=0, need=need)
    found = facts.read(ask(question, tmp_path), question, 0.0, 4e9)
    assert found.cpus == len(os.sched_getaffinity(0))
    assert set(found.devices) <= {"cuda"}
    assert found.port is not None
    assert found.missing == ("/no such",)
    assert found.exp_dir is not None
    assert found.exp_dir.existing == str(tmp_path)
    assert found.exp_dir.unfit == ""
    assert (found.exp_dir.free or 0) > 0
    assert not found.project
    assert found.python is not None
    assert found.python.executable == sys.executable
    assert found.python.version == platform.python_version()
    assert found.python.packages["torch"] == metadata.version("torch")
    assert found.python_error == ""
    assert found.alive == ""


def test_ports_of_this_machine(tmp_path: Path) -> None:
    question = Question("", str(tmp_path), sys.executable, port=0)
    found = facts.read(ask(question, tmp_path), question, 0, 0)
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert found.port is not None
    assert 20_000 <= found.port < low
    with socket.create_server(("127.0.0.1", found.port)):
        taken = replace(question, port=found.port)
        busy = facts.read(ask(taken, tmp_path), taken, 0, 0)
        assert (busy.port, busy.busy_port) == (None, found.port)
        assert f"process {os.getpid()} (" in busy.port_holder
    free = facts.read(ask(taken, tmp_path), taken, 0, 0)
    assert (free.port, free.busy_port) == (found.port, None)


def test_directories_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "whole" / "iter_0000002").mkdir(parents=True)
    (tmp_path / "whole" / "iter_0000010").mkdir()
    (tmp_path / "none" / "iter_2").mkdir(parents=True)
    written = [str(tmp_path / name) for name in (HOSTILE, "file/x", "none/iter_2")]
    whole = ("iter_0000002", "iter_0000010")
    for load, holds in ((tmp_path / "whole", whole), (tmp_path / "none", ()), ("", ())):
        need = Need(str(tmp_path), str(tmp_path), written=written, load=str(load), fresh=True)
        question = Question("", str(tmp_path), sys.executable, need=need)
        found = facts.read(ask(question, tmp_path), question, 0.0, 4e9)
        assert found.checkpoints == holds
        states = [found.written[path] for path in written]
        assert [(one.existing, one.unfit) for one in states] == [
            (str(tmp_path), ""),
            (str(tmp_path / "file"), facts.NOT_A_DIRECTORY),
            (written[2], ""),
        ]
        assert [(one.free or 0) > 0 for one in states][::2] == [True, True]


@pytest.mark.parametrize(
    ("master", "expected"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("192.0.2.1", False), ("", False)],
)
def test_a_master_at_a_loopback_address(master: str, expected: bool, tmp_path: Path) -> None:
    question = Question(master, str(tmp_path), "python")
    assert facts.read(ask(question, tmp_path), question, 0, 0).loopback is expected


@pytest.mark.parametrize(
    ("clock", "expected"),
    [("105.0", 0.0), ("99.0", -1.0), ("112.5", 2.5), ("112,5", 2.5), ("", 0.0)],
)
def test_skew_is_what_the_way_does_not_explain(clock: str, expected: float) -> None:
    question = Question("", "/", "python")
    assert facts.read(Answer({"clock": clock}), question, 100.0, 110.0).skew == expected


def test_a_broken_python_is_told(tmp_path: Path) -> None:
    for python, setup, words in (
        ("/no/python", "", "No such file"),
        ("python3", "echo broken >&2; exit 3", "broken"),
        ("python3", "false", "cannot be activated"),
    ):
        question = Question("", str(tmp_path), python, setup=setup, need=Need("/", "/"))
        found = facts.read(ask(question, tmp_path), question, 0, 0)
        assert words in found.python_error
        assert found.python is None


KEYS = st.from_regex(r"[a-z_]{1,8}", fullmatch=True).filter(lambda name: name != "file")
VALUES = st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)))


@given(values=st.dictionaries(KEYS, VALUES), raw=st.binary(), cut=st.integers(0, 40))
def test_answers_come_back_as_they_were_said(values: dict[str, str], raw: bytes, cut: int) -> None:
    said = b"".join(f"{name}={value}".encode() + b"\0" for name, value in values.items())
    piece = f"file={len(raw)} 7 /a b\nc".encode() + b"\0" + raw
    found = parse(piece + said)
    assert found.values == values
    assert found.pieces == (Piece("/a b\nc", 7, raw),)
    # Whatever is cut off, what is read is a part of what was said.
    part = parse(said[: max(0, len(said) - cut)])
    assert part.values.items() <= values.items()


def test_pieces_are_kept_where_they_belong(make_plan: MakePlan, tmp_path: Path) -> None:
    host = state_of(make_plan(exp_dir=tmp_path)).hosts[0]
    status = host.run_dir / "status" / "rank_0.jsonl"
    place = host.run_dir / "status" / "rank_0.place"
    outside = tmp_path / "outside"
    look.keep(
        [
            Piece(str(status), 0, b"one\n"),
            Piece(str(status), 4, b"two\n"),
            Piece(str(status), 4, b"two\n"),
            Piece(str(place), 0, b"a longer text"),
            Piece(str(place), 0, b"short"),
            Piece(str(outside), 0, b"x"),
            Piece(f"{host.run_dir}/../../../../outside", 0, b"x"),
        ],
        host,
    )
    assert status.read_bytes() == b"one\ntwo\n"
    assert place.read_bytes() == b"short"
    assert not outside.exists()


def test_manifests_tell_code_apart(tmp_path: Path) -> None:
    package = tmp_path / "flagscale" / "inner"
    package.mkdir(parents=True)
    (package / "a.py").write_text("1")
    (package / "notes.txt").write_text("no code")
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "a.py").write_text("no source")
    files = probe.manifest(str(tmp_path))
    assert list(files) == ["flagscale/inner/a.py"]
    before = probe.digest_of(files)
    (package / "a.py").write_text("2")
    assert probe.digest_of(probe.manifest(str(tmp_path))) != before
    assert probe.digest_of({}) == ""
    assert code.pack(tmp_path, files) == code.pack(tmp_path, files)


def test_the_end_is_said_last() -> None:
    done = subprocess.run(
        ["bash", "-c", source(PROGRAMS / "proc.sh") + "say a 1" + END],
        capture_output=True,
        check=True,
    )
    assert parse(done.stdout).values == {"a": "1", "end": "yes"}


def test_secrets_are_in_no_command_line(make_plan: MakePlan) -> None:
    plan = make_plan(hosts=TWO, envs=Environments({"API_TOKEN": "s3cr3t"}), runner=Runner())
    host = plan.hosts[0]
    text = start.text(host, plan.run_id, {host.script: render(plan, host)})
    assert "export API_TOKEN=s3cr3t" in text
    assert "s3cr3t" not in render(plan, host)
