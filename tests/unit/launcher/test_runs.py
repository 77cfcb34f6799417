"""Tests of the registry of the user's runs: its files, and the lookup of runs by text."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.arguments import train_arguments
from support.waiting import wait_for

from flagscale.config.schema import Experiment
from flagscale.errors import ConfigError, RunStateError, UnreachableError
from flagscale.hosts import processes
from flagscale.launcher import runs
from flagscale.launcher.layout import Layout
from flagscale.launcher.planning.model import LaunchPlan, RunnerHandle
from flagscale.launcher.runs import Outcome, RunEntry
from flagscale.launcher.state import HostState, RunState, make_state
from flagscale.status import RUN_ID_VARIABLE, STATUS_DIR_VARIABLE

MakePlan = Callable[..., LaunchPlan]


@pytest.fixture(autouse=True)
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state home"))
    return tmp_path / "state home" / "flagscale" / "runs"


@pytest.fixture
def state(make_plan: MakePlan, tmp_path: Path) -> RunState:
    return make_state(make_plan(exp_dir=tmp_path / "ü x"))


def register(state: RunState, *ids: str, ended: bool = False) -> list[RunState]:
    """Register a run under each of these ids."""
    states = [replace(state, run_id=run_id) for run_id in ids]
    outcome = Outcome("failed", 1.5, "7/9", [(1, "rank 0 on a: ValueError: no")])
    for state_of_run in states:
        RunEntry(state_of_run, "/conf/train.yaml", "out", outcome if ended else None).save()
    return states


@pytest.mark.parametrize("ended", [False, True])
def test_entry_round_trip(state: RunState, registry: Path, ended: bool) -> None:
    (registered,) = register(state, "20250101-000000-aaaaaa", ended=ended)
    (entry,) = runs.read_entries()
    assert (entry.state, entry.config, entry.given) == (registered, "/conf/train.yaml", "out")
    if ended:
        assert entry.ended is not None
        failures = [tuple(failure) for failure in entry.ended.failures]
        assert (entry.ended.step, failures) == ("7/9", [(1, "rank 0 on a: ValueError: no")])
    (path,) = registry.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(registry.stat().st_mode) == 0o700
    assert stat.S_IMODE(registry.parents[1].stat().st_mode) == 0o700


@pytest.mark.parametrize("state_home", ["", "relative/path"])
def test_default_directory_without_xdg_state_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: RunState, state_home: str
) -> None:
    """The XDG specification ignores a relative path."""
    monkeypatch.setenv("XDG_STATE_HOME", state_home)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    register(state, "a")
    assert (tmp_path / "home/.local/state/flagscale/runs/a.json").is_file()


FIRST, SECOND, OTHER = "19710101-000000-aaaaaa", "19710101-000000-ab0000", "19720101-000000-cccccc"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(FIRST, FIRST, id="whole"),
        pytest.param("1972", OTHER, id="beginning"),
        pytest.param("19710101-000000-ab", SECOND, id="just-long-enough"),
        pytest.param("cccccc", None, id="end"),
        pytest.param("", None, id="empty"),
        pytest.param("*", None, id="pattern"),
    ],
)
def test_a_run_is_named_by_the_beginning_of_its_id(
    state: RunState, text: str, expected: str | None
) -> None:
    register(state, FIRST, SECOND, OTHER)
    named = runs.find_run(text)
    assert (named and named.run_id) == expected


def test_the_beginning_of_several_names_none(state: RunState) -> None:
    register(state, FIRST, SECOND, OTHER)
    with pytest.raises(ConfigError) as raised:
        runs.find_run("1971")
    assert f"1971: 2 runs begin so: {FIRST}, {SECOND}" in str(raised.value)


def test_complete_id_takes_precedence_over_a_prefix(state: RunState) -> None:
    register(state, "20250101-000000-aa", "20250101-000000-aaaaaa")
    named = runs.find_run("20250101-000000-aa")
    assert named is not None
    assert named.run_id == "20250101-000000-aa"


def test_command_without_a_run_takes_the_only_live_one(
    state: RunState, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    register(state, FIRST, ended=True)
    with pytest.raises(
        RunStateError, match=f"`flagscale query` needs a run; the last .*\n  {FIRST}"
    ):
        runs.choose_run("query")
    register(state, OTHER)
    monkeypatch.setattr(runs, "_may_live", lambda _: True)
    assert runs.choose_run("query").run_id == OTHER
    assert f"run {OTHER} ({state.name})" in capsys.readouterr().err
    with pytest.raises(RunStateError, match=f"`flagscale stop` needs a run; alive:\n  {OTHER}"):
        runs.choose_run("stop")  # it ends no run that nobody has named
    register(state, SECOND)
    with pytest.raises(RunStateError, match=f"alive:\n  {OTHER}.*\n  {SECOND}"):
        runs.choose_run("logs")


def test_unknown_run_lists_the_registered_runs(state: RunState) -> None:
    register(state, FIRST, OTHER)
    with pytest.raises(RunStateError) as raised:
        runs.require_run("nope")
    assert f"`flagscale runs` lists yours: {OTHER}, {FIRST}" in str(raised.value)


def test_removed_directory_still_names_its_last_run(
    state: RunState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(state, FIRST, OTHER)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(state.exp_dir)
    for text in (str(state.exp_dir), "./ü x/", "here/../ü x", "./link"):
        named = runs.find_run(text)
        assert named is not None
        assert named.run_id == OTHER
    assert runs.find_run("./elsewhere") is None


def test_state_in_the_directory_takes_precedence(state: RunState) -> None:
    (registered,) = register(state, FIRST)
    path = Layout(state.exp_dir).state
    path.parent.mkdir(parents=True)
    replace(registered, stop_requested=5.0).save(path)
    named = runs.find_run(FIRST)
    assert named is not None
    assert named.stop_requested == 5.0
    replace(registered, run_id=OTHER, stop_requested=6.0).save(path)
    named = runs.find_run(FIRST)
    assert named is not None
    assert named.stop_requested is None


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b"{}",
        b'{"state": 3}',
        b'{"state": {}, "ended": null}',
    ],
)
def test_unreadable_entries_are_skipped(state: RunState, registry: Path, text: bytes) -> None:
    register(state, FIRST)
    (registry / "19700101-000000-dddddd.json").write_bytes(text)
    (registry / "19700101-000000-eeeeee.json").mkdir()
    (registry / "note.txt").write_text("{}", encoding="utf-8")
    assert [entry.state.run_id for entry in runs.read_entries()] == [FIRST]


@pytest.mark.parametrize("ended", ['{"phase": "failed"}', '"failed"', '{"more": 1}'])
def test_outcome_of_another_version_is_skipped(state: RunState, registry: Path, ended: str) -> None:
    register(state, FIRST)
    path = registry / f"{FIRST}.json"
    record = {**json.loads(path.read_text(encoding="utf-8")), "ended": json.loads(ended)}
    path.write_text(json.dumps(record), encoding="utf-8")
    assert runs.read_entries() == []


def test_the_oldest_that_have_ended_are_forgotten(
    state: RunState, monkeypatch: pytest.MonkeyPatch, make_plan: MakePlan, tmp_path: Path
) -> None:
    monkeypatch.setattr(runs, "_MAX_ENTRIES", 4)
    register(state, "01", "03", ended=True)
    register(state, "02", "04")
    register(state, "05", ended=True)
    plan = replace(make_plan(exp_dir=tmp_path / "n"), run_id="06")
    with runs.register_run(plan, make_run_experiment(tmp_path / "n", tmp_path)):
        # 02 may live; 05 is young.
        assert [entry.state.run_id for entry in runs.read_entries()] == [
            "02",
            "03",
            "04",
            "05",
            "06",
        ]


def make_run_experiment(exp_dir: Path, root: Path, given: str = "out") -> Experiment:
    from flagscale.config.schema import Commands, Environments, Runner, Task

    return Experiment(
        name="lab",
        exp_dir=exp_dir,
        task=Task(entrypoint=root / "p.py", external=True),
        runner=Runner(),
        envs=Environments(),
        cmds=Commands(),
        train=train_arguments(),
        config_file=Path("/conf/train.yaml"),
        resolved={"experiment": {"exp_dir": given}},
    )


@pytest.mark.parametrize(
    ("error", "registered"),
    [
        pytest.param(RunStateError("no"), False, id="refused"),
        pytest.param(UnreachableError("no"), True, id="may-live"),
        pytest.param(KeyboardInterrupt(), True, id="interrupted"),
    ],
)
def test_a_run_that_was_not_started_is_forgotten(
    make_plan: MakePlan, tmp_path: Path, error: BaseException, registered: bool
) -> None:
    plan = make_plan(exp_dir=tmp_path / "n")
    with (
        pytest.raises(type(error)),
        runs.register_run(plan, make_run_experiment(plan.exp_dir, tmp_path)),
    ):
        assert [entry.state.run_id for entry in runs.read_entries()] == [plan.run_id]
        raise error
    assert bool(runs.read_entries()) is registered


def test_a_state_directory_that_cannot_be_written_is_a_note(
    make_plan: MakePlan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    plan = make_plan(exp_dir=tmp_path / "n")
    with runs.register_run(plan, make_run_experiment(plan.exp_dir, tmp_path)) as update:
        update(make_state(plan))
    note = f"note: run {plan.run_id} is not registered: {tmp_path}/file/flagscale"
    assert note in capsys.readouterr().err
    assert runs.read_entries() == []
    assert runs.find_run(plan.run_id) is None


@pytest.mark.root
def test_a_registry_that_may_not_be_read_is_empty(state: RunState, registry: Path) -> None:
    register(state, FIRST)
    os.setresuid(65534, 65534, 0)
    try:
        assert runs.read_entries() == []
        assert runs.find_run(FIRST) is None
    finally:
        os.setresuid(0, 0, 0)


WRITER = """
import sys
from pathlib import Path
from flagscale.files import read_json
from flagscale.launcher import runs
from flagscale.launcher.state import read_state
path = Path(sys.argv[1])
state = read_state(read_json(path), path)
from dataclasses import replace
for number in range(60):
    runs.RunEntry(replace(state, run_id=f"{sys.argv[2]}-{number:02}")).save()
    runs.RunEntry(replace(state, run_id="shared", name=sys.argv[2])).save()
    assert any(entry.state.run_id == "shared" for entry in runs.read_entries())
"""


def test_two_launchers_write_at_once(state: RunState, tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    state.save(path)
    command = [sys.executable, "-c", WRITER, str(path)]
    writers = [subprocess.Popen([*command, name], cwd=os.getcwd()) for name in ("a", "b")]  # noqa: PTH109
    assert [writer.wait() for writer in writers] == [0, 0]
    ids = {entry.state.run_id for entry in runs.read_entries()}
    assert ids == {"shared", *(f"{name}-{number:02}" for name in "ab" for number in range(60))}


@pytest.fixture
def start_unregistered(tmp_path: Path) -> Iterator[Callable[[str, Path], RunState]]:
    """Start a process with a run's id in its environment, of a run that is not registered."""
    started_processes = []

    def start(run_id: str, run_dir: Path) -> None:
        identity = {RUN_ID_VARIABLE: run_id, STATUS_DIR_VARIABLE: str(run_dir / "status")}
        started_processes.append(subprocess.Popen(["sleep", "600"], env={**os.environ, **identity}))
        # A new program is visible a moment before its environment can be read.
        wait_for(lambda: processes.read_environment(started_processes[-1].pid))

    yield start
    for process in started_processes:
        process.kill()
        process.wait()


def test_run_known_by_its_processes_only(
    start_unregistered: Callable[[str, Path], None], tmp_path: Path, state: RunState
) -> None:
    run_id = f"19990101-000000-{os.urandom(4).hex()}"
    exp_dir = tmp_path / "gone" / "exp"
    start_unregistered(run_id, exp_dir / "logs/details/host_0_a" / run_id)
    run = runs.find_in_directory(exp_dir)
    assert run is not None
    assert (run.run_id, run.exp_dir, run.name) == (run_id, exp_dir, "exp")
    named = runs.find_run(run_id)
    assert named == run
    register(state, FIRST)
    listed_ids = [entry.state.run_id for entry in runs.find_all_runs()]
    assert listed_ids[0] == FIRST
    assert run_id in listed_ids
    assert runs.query_run(run).phase.value == "running"


def test_a_beginning_that_is_also_an_unregistered_runs_names_none(
    start_unregistered: Callable[[str, Path], None], tmp_path: Path, state: RunState
) -> None:
    begin = f"19990101-{os.urandom(4).hex()}"
    start_unregistered(f"{begin}-b", tmp_path / "d" / f"{begin}-b")
    register(state, f"{begin}-a")
    with pytest.raises(ConfigError, match="2 runs begin so"):
        runs.find_run(begin)


def test_local_run_of_another_machine_is_not_queried(state: RunState) -> None:
    """Its files are visible on a shared file system; that nothing is alive here does not mean that
    it ended.
    """
    host = replace(state.hosts[0], pid=1, start_ticks=1, boot_id="another")
    remote_state = replace(state, runner=RunnerHandle("local", {"machine": "nod"}), hosts=(host,))
    register(remote_state, FIRST)
    with pytest.raises(UnreachableError, match="was started on nod, which this machine") as raised:
        runs.query_run(replace(remote_state, run_id=FIRST))
    assert raised.value.hint == "run the command on nod"
    assert runs.read_entries()[0].ended is None
    # A machine keeps its boot when it is renamed.
    renamed = replace(remote_state, hosts=(replace(host, boot_id=processes.read_boot_id()),))
    assert runs.query_run(renamed).phase.value == "lost"


@pytest.mark.parametrize("ways", [[{"way": "rsh"}], [{}, {}]])
def test_handle_of_another_version_is_reported(state: RunState, ways: list[dict[str, str]]) -> None:
    other_version = replace(state, runner=RunnerHandle("ssh", {"hosts": ways}))
    with pytest.raises(RunStateError, match="was started by another version"):
        runs.query_run(other_version)


def test_an_end_is_remembered(state: RunState) -> None:
    register(state, FIRST, OTHER)
    assert runs.query_run(replace(state, run_id=FIRST)).phase.value == "lost"
    first, second = runs.read_entries()
    assert first.ended is not None
    assert (first.ended.phase, second.ended) == ("lost", None)
    assert (first.state.run_id, first.config) == (FIRST, "/conf/train.yaml")


def test_relative_directories_are_looked_for_elsewhere(
    state: RunState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = make_run_experiment(tmp_path / "here" / "out", tmp_path)
    register(state, FIRST)
    # The first run is lost, see above.
    assert runs.find_elsewhere(experiment) == []
    assert runs.find_of_experiment(experiment) is None
    remote_runner = RunnerHandle("local", {"machine": "nod"})
    remote_state = replace(state, runner=remote_runner)
    first, second = register(remote_state, OTHER, "19720101-000000-dddddd")
    assert runs.find_elsewhere(experiment) == [first, second]
    assert runs.find_elsewhere(make_run_experiment(tmp_path / "here", tmp_path, given="/out")) == []
    assert runs.find_elsewhere(make_run_experiment(tmp_path / "here", tmp_path, given="in")) == []
    with pytest.raises(RunStateError) as raised:
        runs.find_of_experiment(experiment)
    message = str(raised.value)
    assert "2 of this configuration may live elsewhere" in message
    assert f"{OTHER} in {state.exp_dir}" in message
    assert "hint: name one by its id" in message


def test_ended_runs_are_not_queried(state: RunState, capsys: pytest.CaptureFixture[str]) -> None:
    from flagscale.launcher.listing import list_runs

    # The host does not exist, so a query would block.
    unreachable_runner = RunnerHandle("ssh", {"hosts": [{"port": 1}], "config": "/nowhere"})
    nodes: tuple[HostState, ...] = (replace(state.hosts[0], name="192.0.2.1"),)
    ids = [f"19710101-{number:06}-aaaaaa" for number in range(300)]
    register(replace(state, runner=unreachable_runner, hosts=nodes), *ids, ended=True)
    assert list_runs(None, include_old=True, as_json=True) == 0
    listed_runs = json.loads(capsys.readouterr().out)
    assert [row["run_id"] for row in listed_runs][: len(ids)] == ids[::-1], "newest first"
    assert {(row["state"], row["step"], row["there"]) for row in listed_runs[: len(ids)]} == {
        ("failed", "7/9", False)
    }
    assert list_runs(None, include_old=False, as_json=True) == 0
    assert not set(ids) & {row["run_id"] for row in json.loads(capsys.readouterr().out)}


def test_a_list_has_the_newest_runs_and_jobs_of_a_scheduler(
    state: RunState,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from flagscale.launcher.listing import list_runs
    from flagscale.launcher.run_filter import RunFilter

    monkeypatch.setenv("COLUMNS", "200")
    ids = [f"19710101-{number:06}-aaaaaa" for number in range(5)]
    # Other runs may be alive on this machine.
    name = "of this test"
    scheduled = replace(state, name=name, runner=RunnerHandle("slurm", {"job": "4711"}))
    register(scheduled, *ids, ended=True)
    assert list_runs(None) == 0
    assert "4711" not in capsys.readouterr().out, "they ended long ago"
    newest = RunFilter(name=name, limit=2)
    assert list_runs(None, run_filter=newest, csv_file=tmp_path / "r.csv") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert [line[:2] for line in lines[2:]] == [[ids[4], "4711"], [ids[3], "4711"]]
    assert [line.split(",")[5] for line in (tmp_path / "r.csv").read_text().splitlines()] == [
        *("job", "4711", "4711"),
    ]
    assert list_runs(None, run_filter=RunFilter(("running",), name=name)) == 0
    assert capsys.readouterr().out == "no such run\n"


def test_name_means_newest_run_of_one_directory(state: RunState, tmp_path: Path) -> None:
    register(state, "20250101-000000-aaaaaa", "20250102-000000-bbbbbb")
    found = runs.find_run(state.name)
    assert found is not None
    assert found.run_id == "20250102-000000-bbbbbb"
    register(replace(state, exp_dir=tmp_path / "other"), "20250103-000000-cccccc")
    with pytest.raises(ConfigError, match="of this name are in 2 directories") as caught:
        runs.find_run(state.name)
    assert "20250103-000000-cccccc in" in caught.value.message
