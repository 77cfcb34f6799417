"""Tests of the preflight check of the checkpoint that training would load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.arguments import train_arguments

from flagscale.config.schema import Experiment, Runner, Task
from flagscale.hosts.facts import HostFacts
from flagscale.hosts.hostfile import Host
from flagscale.hosts.python_environment import PythonEnvironment
from flagscale.launcher.layout import Layout
from flagscale.launcher.planning.per_host import resolve_settings
from flagscale.launcher.preflight.checkpoint import check_checkpoint
from flagscale.launcher.preflight.checks import Check
from flagscale.launcher.preflight.directories import HostPaths, collect_host_paths
from flagscale.launcher.runners.hosts import HostRunner
from flagscale.train.checkpoint.store import CheckpointStore

OWN = "/data/runs/tiny"
MODEL = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "seq_length": 8,
         "lr": 0.1, "train_iters": 10, "vocab_size": 100, "mock_data": True}  # fmt: skip

MakeExperiment = Callable[..., Experiment]


@pytest.fixture
def experiment(make_experiment: MakeExperiment) -> MakeExperiment:
    """Return an experiment of this project's own program with these arguments."""

    def make(*, exp_dir: Path = Path(OWN), **arguments: Any) -> Experiment:
        return make_experiment(
            task=Task(entrypoint=Path("/opt/program.py")),
            train=train_arguments(system={"checkpoint": {**MODEL, **arguments}}),
            runner=Runner(nproc_per_node=1),
            exp_dir=exp_dir,
        )

    return make


def paths_of(experiment: Experiment) -> HostPaths:
    settings = resolve_settings(experiment, Host("h0", 1))
    return collect_host_paths(experiment, Layout(experiment.exp_dir), settings, is_first=True)


def make_facts(
    *checkpoints: int, load_reply: dict[str, Any] | None = None, has_python: bool = True
) -> HostFacts:
    names = tuple(f"iter_{number:07d}" for number in checkpoints)
    replies = {} if load_reply is None else {"load": load_reply}
    python = PythonEnvironment("3.11", "/python", module_replies=replies) if has_python else None
    return HostFacts(1, {}, "eth0", "b", 0.0, checkpoints=names, python=python)


def complete_reply(load: str, iteration: int, *skipped: str, **content: Any) -> dict[str, Any]:
    path = f"{load}/iter_{iteration:07d}"
    return {"path": path, "iteration": iteration, "content": content, "skipped": list(skipped)}


@pytest.mark.parametrize(
    ("arguments", "row"),
    [
        pytest.param(
            {}, (True, False, f"{OWN}/checkpoints contains no checkpoint; "), id="first-run"
        ),
        pytest.param({"load": "/l"}, (True, True, "/l contains no checkpoint; "), id="load"),
        pytest.param(
            {"load": "/l", "save": "/l"}, (True, False, "/l contains no"), id="resumes-its-own"
        ),
        pytest.param(
            {"load": "/l", "finetune": True},
            (False, True, "/l contains no checkpoint, but finetune requires a checkpoint"),
            id="finetune",
        ),
        pytest.param(
            {"load": None, "finetune": True},
            (False, False, "load is not set, but finetune requires a checkpoint"),
            id="finetune-of-nothing",
        ),
        pytest.param({"load": None}, None, id="no-load"),
        pytest.param(
            {"save": "s3://bucket/run"},
            (True, True, "s3://bucket/run was not checked: its Python was not queried"),
            id="storage-that-was-not-asked",
        ),
        pytest.param(
            {"load": "/l", "finetune": True, "pretrained_checkpoint": "/models/m"},
            (
                True,
                True,
                "/l contains no checkpoint; training starts from step 0 with the weights of",
            ),
            id="pretrained",
        ),
    ],
)
def test_no_checkpoint(
    experiment: MakeExperiment, arguments: dict[str, Any], row: tuple[bool, bool, str] | None
) -> None:
    check = check_checkpoint(paths_of(experiment(**arguments)), make_facts(), make_facts(), 1)
    if row is None:
        assert check is None
        return
    assert check is not None
    assert (check.ok, check.warning) == row[:2]
    assert check.found.startswith(row[2])
    assert bool(check.hint) is not check.ok


LONGER = {"lr_decay_steps": 5, "wd_incr_steps": 5}
CUT = "iter_0000005: a.distcp has 99 bytes, expected 100"


@pytest.mark.parametrize(
    ("arguments", "reply", "row"),
    [
        pytest.param({}, complete_reply("/l", 4), (True, False, "iteration 4 in /l"), id="whole"),
        pytest.param(
            {},
            complete_reply("/l", 4, CUT),
            (True, True, f"iteration 4 in /l; skipped {CUT}"),
            id="cut",
        ),
        pytest.param(
            {},
            complete_reply("/l", 4, "a", "b", "c", "d", "e"),
            (True, True, "in /l; skipped a; skipped b; skipped c; skipped 2 more"),
            id="many",
        ),
        pytest.param(
            {"finetune": True},
            complete_reply("/l", 4, schedule=LONGER),
            (True, False, "iteration 4 in /l; weights only (finetune)"),
            id="finetune",
        ),
        pytest.param(
            {},
            complete_reply("/l", 10),
            (True, True, "all 10 steps are done: nothing to train"),
            id="done",
        ),
        pytest.param(
            {"skip_train": True, "lr": None, "train_iters": None},
            complete_reply("/l", 10, schedule=LONGER),
            (True, False, "iteration 10 in /l; without optimizer and schedule (skip_train)"),
            id="evaluated",
        ),
        pytest.param(
            {},
            complete_reply("/l", 4, schedule=LONGER),
            (
                False,
                False,
                "iter_0000004 in /l: the hyperparameters of the checkpoint differ from the "
                "arguments: length of the decay in samples (lr_decay_iters x global_batch_size "
                "or lr_decay_samples; without them train_iters or train_samples): the checkpoint "
                "has 5, the arguments 10",
            ),
            id="longer",
        ),
        pytest.param(
            {"num_layers": 2, "hidden_size": 16},
            complete_reply(
                "/l", 4, architecture={"num_layers": 1, "hidden_size": 8, "swiglu": None}
            ),
            (
                False,
                False,
                "is of another model: num_layers: the checkpoint has 1, the run 2; hidden_size: "
                "the checkpoint has 8, the run 16",
            ),
            id="other-model",
        ),
        pytest.param(
            {},
            complete_reply("/elsewhere", 5),
            (False, False, "/elsewhere/iter_0000005 does not exist on this host"),
            id="not-shared",
        ),
        pytest.param(
            {},
            {"refused": "/l: holds no whole checkpoint:\n  a: b\n  c: d", "hint": "remove"},
            (False, False, "/l: holds no whole checkpoint: a: b; c: d"),
            id="none-whole",
        ),
        pytest.param(
            {},
            {"refused": "[Errno 5] Input/output error", "hint": None},
            (False, False, "/l: [Errno 5] Input/output error"),
            id="unreadable",
        ),
        pytest.param(
            {},
            {"problem": "No module named torch"},
            (True, True, "/l contains checkpoints, but they could not be checked: No module"),
            id="no-answer",
        ),
        pytest.param({}, None, (True, True, "its Python was not queried"), id="not-asked"),
    ],
)
def test_complete_checkpoint(
    experiment: MakeExperiment,
    arguments: dict[str, Any],
    reply: dict[str, Any] | None,
    row: tuple[bool, bool, str],
) -> None:
    host = make_facts(4, 10, load_reply=reply)
    check = check_checkpoint(paths_of(experiment(load="/l", **arguments)), host, host, 1)
    assert check is not None
    assert (check.ok, check.warning) == row[:2]
    assert row[2] in check.found
    assert "\n" not in check.found


def test_rank_0_decides(experiment: MakeExperiment) -> None:
    host_paths = paths_of(experiment(load="/l"))
    master = make_facts(4, load_reply=complete_reply("/l", 4))
    complete_check = check_checkpoint(host_paths, make_facts(4, has_python=False), master, 2)
    assert complete_check is not None
    assert complete_check.found.startswith("iteration 4 in /l")
    missing_check = check_checkpoint(host_paths, make_facts(3, 5), master, 2)
    assert missing_check is not None
    assert not missing_check.ok
    absent_check = check_checkpoint(host_paths, make_facts(4), make_facts(), 2)
    assert absent_check is not None
    assert absent_check.found.startswith("/l contains no checkpoint")
    assert check_checkpoint(host_paths, make_facts(4), None, 2) is None


@pytest.fixture
def check_here(experiment: MakeExperiment, tmp_path: Path) -> Callable[..., Check]:
    """Return this machine's own result."""

    def run(**given: Any) -> Check:
        with HostRunner().prepare(experiment(exp_dir=tmp_path, **given), checking=True) as ready:
            (check,) = (
                check_result for check_result in ready.checks if check_result.name == "load"
            )
        return check

    return run


def save_checkpoint(root: Path, iteration: int, **content: Any) -> Path:
    store = CheckpointStore(root)
    (store.begin(iteration) / "a.distcp").write_bytes(b"x" * 100)
    return store.publish(iteration, content)


def test_this_machine_finds_the_complete_checkpoint(
    check_here: Callable[..., Check], tmp_path: Path
) -> None:
    root = tmp_path / "checkpoints"
    assert check_here().found.startswith(f"{root} contains no checkpoint")
    older, newest = save_checkpoint(root, 4, distributed_optimizer=True), save_checkpoint(root, 5)
    assert check_here().found == f"iteration 5 in {root}"
    (newest / "a.distcp").write_bytes(b"x")
    damaged_check = check_here(use_distributed_optimizer=True)
    assert (damaged_check.ok, damaged_check.warning) == (True, True)
    assert damaged_check.found == (
        f"iteration 4 in {root}; skipped iter_0000005: a.distcp has 1 bytes, expected 100"
    )
    result = check_here()
    assert not result.ok
    assert "saved with use_distributed_optimizer: true, this run has false" in result.found
    assert result.hint.startswith("set use_distributed_optimizer: true")
    (older / "a.distcp").unlink()
    empty_check = check_here()
    assert not empty_check.ok
    assert empty_check.found.startswith(
        f"{root}: holds no whole checkpoint: iter_0000005: a.distcp has"
    )
    assert "remove the damaged directories" in empty_check.hint


def test_this_machine_finds_a_checkpoint_by_its_name(
    check_here: Callable[..., Check], tmp_path: Path
) -> None:
    root, store = tmp_path / "others", CheckpointStore(tmp_path / "others")
    for iteration in (4, 5):
        (store.begin(iteration) / ".metadata").touch()
        store.publish(iteration, {})
    store.mark_best(4)
    for name, iteration in (("best", 4), ("iter_0000004", 4), ("", 5)):
        check = check_here(load=str(root / name))
        assert (check.ok, check.found) == (True, f"iteration {iteration} in {root / name}")
    store.remove([store.path(4)])
    missing = check_here(load=str(root / "best"))
    assert missing.found.startswith(f"{root / 'best'} contains no checkpoint")


def test_tracker_file_without_a_checkpoint_fails(
    check_here: Callable[..., Check], tmp_path: Path
) -> None:
    """The ranks would reject it as well."""
    root = tmp_path / "checkpoints"
    root.mkdir()
    (root / "latest_checkpointed_iteration.txt").write_text("soon")
    result = check_here()
    assert not result.ok
    assert "holds 'soon', expected an iteration" in result.found


def test_a_checkpoint_in_object_storage_needs_no_directory_on_hosts(
    experiment: MakeExperiment,
) -> None:
    address = "s3://bucket/run"
    paths = paths_of(experiment(save=address, override_opt_param_scheduler=True))
    assert (paths.load_dir, paths.expects_checkpoint) == (address, False)
    master = make_facts(load_reply=complete_reply(address, 5))
    check = check_checkpoint(paths, make_facts(), master, 1)
    assert check is not None
    assert check.ok
    assert check.found.startswith(f"iteration 5 in {address}")
