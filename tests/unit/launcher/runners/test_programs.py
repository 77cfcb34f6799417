"""Tests of the programs that are sent to hosts, with shellcheck and this machine's bash."""

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
from flagscale.hosts.facts import HostQuery, ModuleQuery, PreflightQuery
from flagscale.hosts.hostfile import Host
from flagscale.hosts.program import (
    END_RECORD,
    PROGRAMS,
    FileChunk,
    ProgramOutput,
    parse_output,
    read_source,
)
from flagscale.launcher.planning.model import LaunchPlan, Machine
from flagscale.launcher.planning.script import render
from flagscale.launcher.runners.programs import code, filter_output, probe_run, start, stop
from flagscale.launcher.runners.programs.filter_output import FilterRequest
from flagscale.launcher.runners.programs.probe_run import ProbeRequest
from flagscale.launcher.state import RunState, make_state

HOSTILE = "a 'b' \"c\" $d `e` $(f)\n;g"
MakePlan = Callable[..., LaunchPlan]
TWO = (Host("h0", 2), Host("h1", 2, addr="10.0.0.2"))
UNASKED = Machine("/opt/python", Path("/opt/fs"), Path("/work dir"), cpus=None, devices=None)


def shellcheck() -> str:
    beside = Path(sys.executable).with_name("shellcheck")
    return str(beside) if beside.exists() else shutil.which("shellcheck") or "shellcheck"


@pytest.fixture
def state(make_plan: MakePlan) -> RunState:
    return make_state(make_plan(hosts=TWO, exp_dir=Path(f"/data/{HOSTILE}")))


def programs(make_plan: MakePlan, state: RunState) -> dict[str, str]:
    plan = make_plan(hosts=TWO, exp_dir=Path(f"/data/{HOSTILE}"))
    host = plan.hosts[1]
    query = ModuleQuery(HOSTILE, "m", [HOSTILE], HOSTILE, {"A": [HOSTILE]})
    need = PreflightQuery(
        HOSTILE, HOSTILE, [HOSTILE], [HOSTILE], HOSTILE, compare_code=True, module_queries=[query],
        checkpoint_queries=[query, query],
    )  # fmt: skip
    question = HostQuery(HOSTILE, HOSTILE, HOSTILE, HOSTILE, port=0, preflight=need)
    everything = ProbeRequest(fetch=True, output=True, count=True, last_line=True)
    return {
        "facts": facts.build_facts_program(question),
        "start": start.render_start(
            host, plan.run_id, {host.script: HOSTILE}, previous=state.hosts[1]
        ),
        "look": probe_run.render_probe(state, state.hosts[1], everything),
        "stop": stop.render_stop(state, state.hosts[1]),
        "filter": filter_output.render_filter(
            FilterRequest(HOSTILE, HOSTILE, HOSTILE, HOSTILE, pattern=HOSTILE), HOSTILE
        ),
        "unprobed": render(
            make_plan(hosts=TWO, machine=UNASKED), make_plan(hosts=TWO, machine=UNASKED).hosts[1]
        ),
    }


@pytest.mark.parametrize("name", ["facts", "start", "look", "stop", "filter", "unprobed"])
def test_shellcheck_finds_nothing(
    name: str, make_plan: MakePlan, state: RunState, tmp_path: Path
) -> None:
    path = tmp_path / f"{name}.sh"
    # Values are literal; functions are called by name, and variables are used by following parts.
    options = ["--exclude=SC2016,SC2317,SC2329,SC2034,SC2154", "--severity=warning"]
    path.write_text("#!/usr/bin/env bash\n" + programs(make_plan, state)[name], encoding="utf-8")
    argv = [shellcheck(), *options, str(path)]
    result = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert result.stdout == ""
    assert result.returncode == 0


def test_unprobed_host_detects_its_resources(make_plan: MakePlan, tmp_path: Path) -> None:
    fields = {"envs": Environments({"NCCL_NVLS_ENABLE": "1"}), "cmds": Commands("export MINE=yes")}
    plan = make_plan(
        hosts=(Host("localhost", 2), Host("h1", 2)),
        machine=replace(UNASKED, workdir=tmp_path),
        exp_dir=tmp_path / "exp",
        **fields,
    )
    head = render(plan, plan.hosts[0]).partition("phase=before_start")[0]
    show = 'set +u -e; eval "$before_start"; env'
    result = subprocess.run(
        ["bash", "-c", f"{head}\n{show}"], capture_output=True, text=True, check=True
    )
    output = dict(line.split("=", 1) for line in result.stdout.splitlines() if "=" in line)
    assert int(output["OMP_NUM_THREADS"]) >= 1
    assert output["MINE"] == "yes"
    assert output["NCCL_NVLS_ENABLE"] == "1" or "TORCHDYNAMO_DISABLE" in output


def probe_here(question: HostQuery, home: Path, **variables: str) -> ProgramOutput:
    """Return this machine's facts, with a separate home directory."""
    result = subprocess.run(
        ["bash", "-c", facts.build_facts_program(question)],
        env={**os.environ, "HOME": str(home), **variables},
        capture_output=True,
        check=True,
    )
    assert result.stderr == b""
    return parse_output(result.stdout)


# All programs for hosts, in any package.
FILES = sorted(Path(facts.__file__).parents[1].rglob("*.sh"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_shellcheck_reads_every_program_alone(path: Path) -> None:
    result = subprocess.run(
        [shellcheck(), "--severity=warning", str(path)], capture_output=True, text=True, check=False
    )
    assert (result.stdout, result.returncode) == ("", 0)


@pytest.mark.torch
def test_facts_of_this_machine(tmp_path: Path) -> None:
    need = PreflightQuery(
        str(tmp_path), str(tmp_path / "a/b"), ["/", "/no such"], ignore_cache=True
    )
    question = HostQuery("127.0.0.1", str(tmp_path), sys.executable, port=0, preflight=need)
    host_facts = facts.parse_facts(probe_here(question, tmp_path), question, 0.0, 4e9)
    assert host_facts.cpus == len(os.sched_getaffinity(0))
    assert set(host_facts.devices) <= {"cuda"}
    assert host_facts.port is not None
    assert host_facts.missing_paths == ("/no such",)
    assert host_facts.exp_dir is not None
    assert host_facts.exp_dir.existing == str(tmp_path)
    assert host_facts.exp_dir.problem == ""
    assert (host_facts.exp_dir.free_bytes or 0) > 0
    assert not host_facts.has_project
    assert host_facts.python is not None
    assert host_facts.python.executable == sys.executable
    assert host_facts.python.version == platform.python_version()
    assert host_facts.python.packages["torch"] == metadata.version("torch")
    assert host_facts.python_error == ""
    assert host_facts.live_run_id == ""


def test_ports_of_this_machine(tmp_path: Path) -> None:
    question = HostQuery("", str(tmp_path), sys.executable, port=0)
    host_facts = facts.parse_facts(probe_here(question, tmp_path), question, 0, 0)
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert host_facts.port is not None
    assert 20_000 <= host_facts.port < low
    with socket.create_server(("127.0.0.1", host_facts.port)):
        port_query = replace(question, port=host_facts.port)
        busy = facts.parse_facts(probe_here(port_query, tmp_path), port_query, 0, 0)
        assert (busy.port, busy.busy_port) == (None, host_facts.port)
        assert f"process {os.getpid()} (" in busy.port_holder
    free = facts.parse_facts(probe_here(port_query, tmp_path), port_query, 0, 0)
    assert (free.port, free.busy_port) == (host_facts.port, None)


def test_directories_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "whole" / "iter_0000002").mkdir(parents=True)
    (tmp_path / "whole" / "iter_0000010").mkdir()
    (tmp_path / "none" / "iter_2").mkdir(parents=True)
    written = [str(tmp_path / name) for name in (HOSTILE, "file/x", "none/iter_2")]
    checkpoints = ("iter_0000002", "iter_0000010")
    for load, holds in ((tmp_path / "whole", checkpoints), (tmp_path / "none", ()), ("", ())):
        need = PreflightQuery(
            str(tmp_path),
            str(tmp_path),
            output_paths=written,
            load_dir=str(load),
            ignore_cache=True,
        )
        question = HostQuery("", str(tmp_path), sys.executable, preflight=need)
        host_facts = facts.parse_facts(probe_here(question, tmp_path), question, 0.0, 4e9)
        assert host_facts.checkpoints == holds
        states = [host_facts.output_paths[path] for path in written]
        assert [(state.existing, state.problem) for state in states] == [
            (str(tmp_path), ""),
            (str(tmp_path / "file"), facts.NOT_A_DIRECTORY),
            (written[2], ""),
        ]
        assert [(state.free_bytes or 0) > 0 for state in states][::2] == [True, True]


@pytest.mark.parametrize(
    ("master", "expected"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("192.0.2.1", False), ("", False)],
)
def test_a_master_at_a_loopback_address(master: str, expected: bool, tmp_path: Path) -> None:
    question = HostQuery(master, str(tmp_path), "python")
    assert (
        facts.parse_facts(probe_here(question, tmp_path), question, 0, 0).is_master_loopback
        is expected
    )


@pytest.mark.parametrize(
    ("clock", "expected"),
    [("105.0", 0.0), ("99.0", -1.0), ("112.5", 2.5), ("112,5", 2.5), ("", 0.0)],
)
def test_clock_skew_excludes_the_transfer_time(clock: str, expected: float) -> None:
    question = HostQuery("", "/", "python")
    assert (
        facts.parse_facts(ProgramOutput({"clock": clock}), question, 100.0, 110.0).clock_offset
        == expected
    )


def test_broken_python_is_reported(tmp_path: Path) -> None:
    for python, setup, error_text in (
        ("/no/python", "", "No such file"),
        ("python3", "echo broken >&2; exit 3", "broken"),
        ("python3", "false", "cannot be activated"),
    ):
        question = HostQuery(
            "", str(tmp_path), python, setup=setup, preflight=PreflightQuery("/", "/")
        )
        host_facts = facts.parse_facts(probe_here(question, tmp_path), question, 0, 0)
        assert error_text in host_facts.python_error
        assert host_facts.python is None


KEYS = st.from_regex(r"[a-z_]{1,8}", fullmatch=True).filter(lambda name: name != "file")
VALUES = st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)))


@given(values=st.dictionaries(KEYS, VALUES), raw=st.binary(), cut=st.integers(0, 40))
def test_reported_values_are_parsed_unchanged(values: dict[str, str], raw: bytes, cut: int) -> None:
    output = b"".join(f"{name}={value}".encode() + b"\0" for name, value in values.items())
    file_record = f"file={len(raw)} 7 /a b\nc".encode() + b"\0" + raw
    decoded = parse_output(file_record + output)
    assert decoded.values == values
    assert decoded.chunks == (FileChunk("/a b\nc", 7, raw),)
    # Any truncated output is parsed as a prefix of the whole.
    part = parse_output(output[: max(0, len(output) - cut)])
    assert part.values.items() <= values.items()


def test_chunks_are_stored_at_their_offsets(make_plan: MakePlan, tmp_path: Path) -> None:
    host = make_state(make_plan(exp_dir=tmp_path)).hosts[0]
    status = host.run_dir / "status" / "rank_0.jsonl"
    progress_path = host.run_dir / "status" / "rank_0.place"
    outside = tmp_path / "outside"
    probe_run.store_chunks(
        [
            FileChunk(str(status), 0, b"one\n"),
            FileChunk(str(status), 4, b"two\n"),
            FileChunk(str(status), 4, b"two\n"),
            FileChunk(str(progress_path), 0, b"a longer text"),
            FileChunk(str(progress_path), 0, b"short"),
            FileChunk(str(outside), 0, b"x"),
            FileChunk(f"{host.run_dir}/../../../../outside", 0, b"x"),
        ],
        host,
    )
    assert status.read_bytes() == b"one\ntwo\n"
    assert progress_path.read_bytes() == b"short"
    assert not outside.exists()


def test_manifests_distinguish_code(tmp_path: Path) -> None:
    package = tmp_path / "flagscale" / "inner"
    package.mkdir(parents=True)
    (package / "a.py").write_text("1")
    (package / "notes.txt").write_text("no code")
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "a.py").write_text("no source")
    files = probe.build_manifest(str(tmp_path))
    assert list(files) == ["flagscale/inner/a.py"]
    digest_before = probe.digest_manifest(files)
    (package / "a.py").write_text("2")
    assert probe.digest_manifest(probe.build_manifest(str(tmp_path))) != digest_before
    assert probe.digest_manifest({}) == ""
    assert code.pack_archive(tmp_path, files) == code.pack_archive(tmp_path, files)


def test_end_marker_is_printed_last() -> None:
    result = subprocess.run(
        ["bash", "-c", read_source(PROGRAMS / "proc.sh") + "report a 1" + END_RECORD],
        capture_output=True,
        check=True,
    )
    assert parse_output(result.stdout).values == {"a": "1", "end": "yes"}


def test_secrets_are_in_no_command_line(make_plan: MakePlan) -> None:
    plan = make_plan(hosts=TWO, envs=Environments({"API_TOKEN": "s3cr3t"}), runner=Runner())
    host = plan.hosts[0]
    text = start.render_start(host, plan.run_id, {host.script: render(plan, host)})
    assert "export API_TOKEN=s3cr3t" in text
    assert "s3cr3t" not in render(plan, host)
