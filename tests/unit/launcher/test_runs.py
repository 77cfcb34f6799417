"""The registry of the user's runs: its files, and what a text names."""

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
from support.launch_lab import until

from flagscale.config.schema import Experiment
from flagscale.errors import ConfigError, RunStateError, UnreachableError
from flagscale.hosts import processes
from flagscale.launcher import runs
from flagscale.launcher.layout import Layout
from flagscale.launcher.planning.model import LaunchPlan, RunnerHandle
from flagscale.launcher.runs import Entry, Outcome
from flagscale.launcher.state import HostState, RunState, state_of
from flagscale.status import RUN_ID_VARIABLE, STATUS_DIR_VARIABLE

MakePlan = Callable[..., LaunchPlan]


@pytest.fixture(autouse=True)
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state home"))
    return tmp_path / "state home" / "flagscale" / "runs"


@pytest.fixture
def state(make_plan: MakePlan, tmp_path: Path) -> RunState:
    return state_of(make_plan(exp_dir=tmp_path / "ü x"))


def register(state: RunState, *ids: str, ended: bool = False) -> list[RunState]:
    """Register a run under each of these ids."""
    found = [replace(state, run_id=run_id) for run_id in ids]
    outcome = Outcome("failed", 1.5, "7/9", [(1, "rank 0 on a: ValueError: no")])
    for one in found:
        Entry(one, "/conf/train.yaml", "out", outcome if ended else None).save()
    return found


@pytest.mark.parametrize("ended", [False, True])
def test_an_entry_is_read_as_it_was_written(state: RunState, registry: Path, ended: bool) -> None:
    (one,) = register(state, "20250101-000000-aaaaaa", ended=ended)
    (entry,) = runs.entries()
    assert (entry.state, entry.config, entry.given) == (one, "/conf/train.yaml", "out")
    if ended:
        assert entry.ended is not None
        failures = [tuple(failure) for failure in entry.ended.failures]
        assert (entry.ended.step, failures) == ("7/9", [(1, "rank 0 on a: ValueError: no")])
    (path,) = registry.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(registry.stat().st_mode) == 0o700
    assert stat.S_IMODE(registry.parents[1].stat().st_mode) == 0o700


@pytest.mark.parametrize("given", ["", "relative/path"])
def test_where_it_is_without_a_state_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: RunState, given: str
) -> None:
    """The specification has a path that is not absolute ignored."""
    monkeypatch.setenv("XDG_STATE_HOME", given)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    register(state, "a")
    assert (tmp_path / "home/.local/state/flagscale/runs/a.json").is_file()


FIRST, SECOND, OTHER = "19710101-000000-aaaaaa", "19710101-000000-ab0000", "19720101-000000-cccccc"


@pytest.mark.parametrize(
    ("text", "found"),
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
    state: RunState, text: str, found: str | None
) -> None:
    register(state, FIRST, SECOND, OTHER)
    named = runs.find(text)
    assert (named and named.run_id) == found


def test_the_beginning_of_several_names_none(state: RunState) -> None:
    register(state, FIRST, SECOND, OTHER)
    with pytest.raises(ConfigError) as raised:
        runs.find("1971")
    assert f"1971: 2 runs begin so: {FIRST}, {SECOND}" in str(raised.value)


def test_a_whole_id_is_no_beginning(state: RunState) -> None:
    register(state, "20250101-000000-aa", "20250101-000000-aaaaaa")
    named = runs.find("20250101-000000-aa")
    assert named is not None
    assert named.run_id == "20250101-000000-aa"


def test_what_names_nothing_says_what_there_is(state: RunState) -> None:
    register(state, FIRST, OTHER)
    with pytest.raises(RunStateError) as raised:
        runs.named("nope")
    assert f"`flagscale runs` lists yours: {OTHER}, {FIRST}" in str(raised.value)


def test_a_directory_names_its_last_run_though_it_is_gone(
    state: RunState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(state, FIRST, OTHER)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(state.exp_dir)
    for text in (str(state.exp_dir), "./ü x/", "here/../ü x", "./link"):
        named = runs.find(text)
        assert named is not None
        assert named.run_id == OTHER
    assert runs.find("./elsewhere") is None


def test_what_a_runs_directory_says_goes_first(state: RunState) -> None:
    (one,) = register(state, FIRST)
    path = Layout(state.exp_dir).state
    path.parent.mkdir(parents=True)
    replace(one, stop_requested=5.0).save(path)
    named = runs.find(FIRST)
    assert named is not None
    assert named.stop_requested == 5.0
    replace(one, run_id=OTHER, stop_requested=6.0).save(path)
    named = runs.find(FIRST)
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
def test_what_cannot_be_read_is_left_out(state: RunState, registry: Path, text: bytes) -> None:
    register(state, FIRST)
    (registry / "19700101-000000-dddddd.json").write_bytes(text)
    (registry / "19700101-000000-eeeeee.json").mkdir()
    (registry / "note.txt").write_text("{}", encoding="utf-8")
    assert [entry.state.run_id for entry in runs.entries()] == [FIRST]


@pytest.mark.parametrize("ended", ['{"phase": "failed"}', '"failed"', '{"more": 1}'])
def test_an_end_of_another_version_is_left_out(state: RunState, registry: Path, ended: str) -> None:
    register(state, FIRST)
    path = registry / f"{FIRST}.json"
    record = {**json.loads(path.read_text(encoding="utf-8")), "ended": json.loads(ended)}
    path.write_text(json.dumps(record), encoding="utf-8")
    assert runs.entries() == []


def test_the_oldest_that_have_ended_are_forgotten(
    state: RunState, monkeypatch: pytest.MonkeyPatch, make_plan: MakePlan, tmp_path: Path
) -> None:
    monkeypatch.setattr(runs, "_MOST_KEPT", 4)
    register(state, "01", "03", ended=True)
    register(state, "02", "04")
    register(state, "05", ended=True)
    plan = replace(make_plan(exp_dir=tmp_path / "n"), run_id="06")
    with runs.registered(plan, experiment_of(tmp_path / "n", tmp_path)):
        # 02 may live; 05 is young.
        assert [entry.state.run_id for entry in runs.entries()] == ["02", "03", "04", "05", "06"]


def experiment_of(exp_dir: Path, root: Path, given: str = "out") -> Experiment:
    from flagscale.config.schema import Commands, Environments, Runner, Task, Train

    return Experiment(
        name="lab",
        exp_dir=exp_dir,
        task=Task(entrypoint=root / "p.py", external=True),
        runner=Runner(),
        envs=Environments(),
        cmds=Commands(),
        train=Train(),
        config_file=Path("/conf/train.yaml"),
        resolved={"experiment": {"exp_dir": given}},
    )


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        pytest.param(RunStateError("no"), False, id="refused"),
        pytest.param(UnreachableError("no"), True, id="may-live"),
        pytest.param(KeyboardInterrupt(), True, id="interrupted"),
    ],
)
def test_a_run_that_was_not_started_is_forgotten(
    make_plan: MakePlan, tmp_path: Path, error: BaseException, kept: bool
) -> None:
    plan = make_plan(exp_dir=tmp_path / "n")
    with (
        pytest.raises(type(error)),
        runs.registered(plan, experiment_of(plan.exp_dir, tmp_path)),
    ):
        assert [entry.state.run_id for entry in runs.entries()] == [plan.run_id]
        raise error
    assert bool(runs.entries()) is kept


def test_a_state_directory_that_cannot_be_written_is_a_note(
    make_plan: MakePlan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    plan = make_plan(exp_dir=tmp_path / "n")
    with runs.registered(plan, experiment_of(plan.exp_dir, tmp_path)) as update:
        update(state_of(plan))
    note = f"note: run {plan.run_id} is not registered: {tmp_path}/file/flagscale"
    assert note in capsys.readouterr().err
    assert runs.entries() == []
    assert runs.find(plan.run_id) is None


@pytest.mark.root
def test_a_registry_that_may_not_be_read_is_empty(state: RunState, registry: Path) -> None:
    register(state, FIRST)
    os.setresuid(65534, 65534, 0)
    try:
        assert runs.entries() == []
        assert runs.find(FIRST) is None
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
    runs.Entry(replace(state, run_id=f"{sys.argv[2]}-{number:02}")).save()
    runs.Entry(replace(state, run_id="shared", name=sys.argv[2])).save()
    assert any(entry.state.run_id == "shared" for entry in runs.entries())
"""


def test_two_launchers_write_at_once(state: RunState, tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    state.save(path)
    command = [sys.executable, "-c", WRITER, str(path)]
    writers = [subprocess.Popen([*command, name], cwd=os.getcwd()) for name in ("a", "b")]  # noqa: PTH109
    assert [writer.wait() for writer in writers] == [0, 0]
    ids = {entry.state.run_id for entry in runs.entries()}
    assert ids == {"shared", *(f"{name}-{number:02}" for name in "ab" for number in range(60))}


@pytest.fixture
def stray(tmp_path: Path) -> Iterator[Callable[[str, Path], RunState]]:
    """Start a process that carries a run's id, of which nothing else tells."""
    started = []

    def start(run_id: str, run_dir: Path) -> None:
        own = {RUN_ID_VARIABLE: run_id, STATUS_DIR_VARIABLE: str(run_dir / "status")}
        started.append(subprocess.Popen(["sleep", "600"], env={**os.environ, **own}))
        # The kernel tells of a program's start a moment before its environment can be read.
        until(lambda: processes.environment(started[-1].pid))

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_run_of_which_only_processes_tell(
    stray: Callable[[str, Path], None], tmp_path: Path, state: RunState
) -> None:
    run_id = f"19990101-000000-{os.urandom(4).hex()}"
    exp_dir = tmp_path / "gone" / "exp"
    stray(run_id, exp_dir / "logs/details/host_0_a" / run_id)
    found = runs.of_directory(exp_dir)
    assert found is not None
    assert (found.run_id, found.exp_dir, found.name) == (run_id, exp_dir, "exp")
    named = runs.find(run_id)
    assert named == found
    register(state, FIRST)
    listed = [entry.state.run_id for entry in runs.known()]
    assert listed[0] == FIRST
    assert run_id in listed
    assert runs.query(found).phase.value == "running"


def test_a_beginning_that_is_also_an_unregistered_runs_names_none(
    stray: Callable[[str, Path], None], tmp_path: Path, state: RunState
) -> None:
    begin = f"19990101-{os.urandom(4).hex()}"
    stray(f"{begin}-b", tmp_path / "d" / f"{begin}-b")
    register(state, f"{begin}-a")
    with pytest.raises(ConfigError, match="2 runs begin so"):
        runs.find(begin)


def test_another_machines_own_run_is_not_asked_here(state: RunState) -> None:
    """Files that machines share tell of it: that nothing lives here is no end of it."""
    host = replace(state.hosts[0], pid=1, start_ticks=1, boot_id="another")
    there = replace(state, runner=RunnerHandle("local", {"machine": "nod"}), hosts=(host,))
    register(there, FIRST)
    with pytest.raises(UnreachableError, match="was started on nod, which this machine") as raised:
        runs.query(replace(there, run_id=FIRST))
    assert raised.value.hint == "give the command on nod"
    assert runs.entries()[0].ended is None
    # A machine keeps its boot when it is renamed.
    renamed = replace(there, hosts=(replace(host, boot_id=processes.boot_id()),))
    assert runs.query(renamed).phase.value == "lost"


@pytest.mark.parametrize("ways", [[{"way": "rsh"}], [{}, {}]])
def test_a_handle_of_another_version_is_told(state: RunState, ways: list[dict[str, str]]) -> None:
    other = replace(state, runner=RunnerHandle("ssh", {"hosts": ways}))
    with pytest.raises(RunStateError, match="was started by another version"):
        runs.query(other)


def test_an_end_is_remembered(state: RunState) -> None:
    register(state, FIRST, OTHER)
    assert runs.query(replace(state, run_id=FIRST)).phase.value == "lost"
    first, other = runs.entries()
    assert first.ended is not None
    assert (first.ended.phase, other.ended) == ("lost", None)
    assert (first.state.run_id, first.config) == (FIRST, "/conf/train.yaml")


def test_relative_directories_are_looked_for_elsewhere(
    state: RunState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = experiment_of(tmp_path / "here" / "out", tmp_path)
    register(state, FIRST)
    # That one is lost, see above.
    assert runs.elsewhere(here) == []
    assert runs.of(here) is None
    far = RunnerHandle("local", {"machine": "nod"})
    there = replace(state, runner=far)
    one, other = register(there, OTHER, "19720101-000000-dddddd")
    assert runs.elsewhere(here) == [one, other]
    assert runs.elsewhere(experiment_of(tmp_path / "here", tmp_path, given="/out")) == []
    assert runs.elsewhere(experiment_of(tmp_path / "here", tmp_path, given="in")) == []
    with pytest.raises(RunStateError) as raised:
        runs.of(here)
    message = str(raised.value)
    assert "2 of this configuration may live elsewhere" in message
    assert f"{OTHER} in {state.exp_dir}" in message
    assert "hint: name one by its id" in message


def test_hundreds_that_have_ended_are_not_asked(
    state: RunState, capsys: pytest.CaptureFixture[str]
) -> None:
    from flagscale.launcher.listing import show

    # Whoever asks this host waits: it is nowhere.
    far = RunnerHandle("ssh", {"hosts": [{"port": 1}], "config": "/nowhere"})
    nodes: tuple[HostState, ...] = (replace(state.hosts[0], name="192.0.2.1"),)
    ids = [f"19710101-{number:06}-aaaaaa" for number in range(300)]
    register(replace(state, runner=far, hosts=nodes), *ids, ended=True)
    assert show(None, everything=True, as_json=True) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [row["run_id"] for row in listed][: len(ids)] == ids
    assert {(row["state"], row["step"], row["there"]) for row in listed[: len(ids)]} == {
        ("failed", "7/9", False)
    }
    assert show(None, everything=False, as_json=True) == 0
    assert not set(ids) & {row["run_id"] for row in json.loads(capsys.readouterr().out)}
