"""Loading of a composed YAML as an Experiment."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from flagscale.config.checks import check_files, experiment_notes
from flagscale.config.load import load
from flagscale.config.schema import OWN_PROGRAM, Commands, Environments, Options
from flagscale.config.secrets import redact
from flagscale.errors import ConfigError

if TYPE_CHECKING:
    from conftest import Workspace


def test_complete_experiment_is_loaded(workspace: Workspace) -> None:
    experiment = workspace.load("train.model.num_layers=2")
    assert experiment.name == "demo"
    assert experiment.exp_dir == workspace.root / "outputs demo"
    assert experiment.task.entrypoint == OWN_PROGRAM
    assert not experiment.task.external
    assert (experiment.runner.nnodes, experiment.runner.nproc_per_node) == (1, 2)
    assert experiment.envs == Environments({"CUDA_VISIBLE_DEVICES": "0,1"})
    assert experiment.cmds == Commands()
    assert experiment.train["num_layers"] == 2
    assert experiment.train.spelled["data_path"].value == str(workspace.root / "data/text")
    assert experiment.config_file == workspace.conf / "train.yaml"
    assert experiment.overrides == ("train.model.num_layers=2",)
    assert experiment.sources["train.model.num_layers"] == "override"
    assert json.loads(json.dumps(experiment.resolved))["experiment"]["exp_name"] == "demo"


CHECKOUTS = {
    "flagscale": (
        ("flagscale/__init__.py", "third_party/Megatron-LM/megatron/training/__init__.py"),
        "flagscale/train/train_gpt.py",
        ["third_party/Megatron-LM", "."],
    ),
    "older-flagscale": (
        ("flagscale/__init__.py", "megatron/megatron/training/__init__.py"),
        "flagscale/train/train_aquila.py",
        ["megatron", "."],
    ),
    "flagscale-without-a-backend": (("flagscale/__init__.py",), "flagscale/train/x.py", ["."]),
    "megatron": (("megatron/training/__init__.py",), "pretrain_gpt.py", ["."]),
    "tools": (("megatron/training/__init__.py",), "tools/run/it.py", ["."]),
    "alone": ((), "program.py", []),
    "beside-a-clone": (("flagscale/run.py",), "work/program.py", []),
}


@pytest.mark.parametrize(("files", "program", "packages"), CHECKOUTS.values(), ids=CHECKOUTS)
def test_packages_of_external_program(
    workspace: Workspace, files: tuple[str, ...], program: str, packages: list[str]
) -> None:
    for name in (*files, program):
        workspace.write(f"theirs/{name}", "")
    workspace.replace("conf/train.yaml", "type: train", f"entrypoint: theirs/{program}")
    root = workspace.root / "theirs"
    task = workspace.load(purpose="plan").task
    assert task.external
    assert task.packages == tuple(root / name for name in packages)


GPT_PROGRAMS = ("hetero/train_gpt.py", "megatron/train_gpt.py", "train_aquila.py")


@pytest.mark.parametrize("prefix", ["", "./"], ids=["path", "dot"])
@pytest.mark.parametrize("program", GPT_PROGRAMS)
def test_gpt_program_of_flagscale_is_builtin_program(
    workspace: Workspace, program: str, prefix: str
) -> None:
    entrypoint = f"{prefix}flagscale/train/{program}"
    workspace.replace("conf/train.yaml", "type: train", f"entrypoint: {entrypoint}")
    experiment = workspace.load()
    task = experiment.task
    assert (task.entrypoint, task.external, task.packages) == (OWN_PROGRAM, False, ())
    note = f"experiment.task.entrypoint: {entrypoint} stands for this project's own program"
    assert note in experiment_notes(experiment, 1)


def test_gpt_program_in_working_directory_is_run_itself(workspace: Workspace) -> None:
    program = workspace.write("flagscale/train/megatron/train_gpt.py", "")
    entrypoint = "entrypoint: flagscale/train/megatron/train_gpt.py"
    workspace.replace("conf/train.yaml", "type: train", entrypoint)
    assert workspace.load().task.entrypoint == program


@pytest.mark.parametrize("name", ["cloud", "env"])
def test_position_of_cloud_is_read_from_variables(
    workspace: Workspace, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    text = f"type: {name}\n    nnodes: ${{env:WORLD_SIZE}}\n    node_rank: ${{env:RANK,3}}"
    workspace.replace("conf/train.yaml", "nnodes: 1", text)
    runner = workspace.load().runner
    assert (runner.nnodes, runner.node_rank, runner.foreground) == (4, 3, True)


def test_last_of_repeated_arguments_counts_and_is_noted(workspace: Workspace) -> None:
    workspace.replace("conf/train/tiny.yaml", "data:\n", "data:\n  seed: 7\n")
    workspace.replace("conf/train/tiny.yaml", "num_layers: 4", "num_layers: 4\n  seed: 5")
    experiment = workspace.load()
    assert experiment.train["seed"] == 7
    notes = [note for note in experiment_notes(experiment, 1) if "the last one counts" in note]
    assert len(notes) == 1
    assert re.match(
        r"train.data.seed \(\S+tiny.yaml:\d+\): 7 is used, not 5 of "
        r"train.model.seed \(\S+tiny.yaml:\d+\)",
        notes[0],
    )


def test_query_groups_have_no_effect_if_switched_off(workspace: Workspace) -> None:
    text = "num_layers: 4\n  group_query_attention: false\n  num_query_groups: 2"
    workspace.replace("conf/train/tiny.yaml", "num_layers: 4", text)
    experiment = workspace.load()
    assert experiment.train["num_query_groups"] is None
    (note,) = [n for n in experiment_notes(experiment, 1) if "num_query_groups" in n]
    assert re.match(
        r"train.model.num_query_groups \(\S+:8\) has no effect: train.model.group_", note
    )
    assert workspace.load("train.model.num_query_groups=4").train["num_query_groups"] == 4


def test_repeated_argument_of_one_host_is_rejected(workspace: Workspace) -> None:
    overrides = "node_specific: {h0: {system: {num_workers: 1}, data: {num_workers: 2}}}"
    workspace.replace("conf/train.yaml", "action: run", f"action: run\n{overrides}")
    with pytest.raises(ConfigError, match="num_workers' is given twice"):
        workspace.load()


@pytest.mark.parametrize(
    ("value", "nnodes"), [("1", 1), ('"1"', 1), ("1:4", 1), ('"1:4"', 1), ("null", None)]
)
def test_nnodes_without_hostfile(workspace: Workspace, value: str, nnodes: int | None) -> None:
    workspace.replace("conf/train.yaml", "nnodes: 1", f"nnodes: {value}")
    assert workspace.load().runner.nnodes == nnodes


@pytest.mark.parametrize(("value", "nnodes"), [('"2:4"', 2), ('"4"', 4), ("4", 4), ("2:4", 2)])
def test_nnodes_with_hostfile(workspace: Workspace, value: str, nnodes: int) -> None:
    workspace.replace("conf/train.yaml", "nnodes: 1", f"nnodes: {value}\n    hostfile: hostfile")
    runner = workspace.load().runner
    assert (runner.nnodes, runner.hostfile) == (nnodes, workspace.root / "hostfile")


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("0,1,2", "0,1,2"),
        ("1", "1"),
        ("010", "010"),
        ("1.50", "1.50"),
        ("1e3", "1e3"),
        ("12:30:45", "12:30:45"),
        ("yes", "yes"),
        ("true", "true"),
        ("'  spaced '", "  spaced "),
        ('"a$HOME `id` \\" \'"', "a$HOME `id` \" '"),
        ('"two\\nlines"', "two\nlines"),
        ("''", ""),
        ("${experiment.runner.nproc_per_node}", "2"),
        ("${experiment.exp_name}-x", "demo-x"),
        ("é日本", "é日本"),
    ],
)
def test_environment_values_keep_their_text(workspace: Workspace, written: str, text: str) -> None:
    workspace.replace("conf/train.yaml", "  envs:\n", f"  envs:\n    X: {written}\n")
    assert workspace.load().envs.common["X"] == text


def test_environment_per_device_type_and_host(workspace: Workspace) -> None:
    workspace.replace(
        "conf/train.yaml",
        "    CUDA_VISIBLE_DEVICES: 0,1\n",
        "    A: 1\n    B: 2\n    GONE: null\n"
        "    device_type_specific:\n      A800: {A: 10}\n      BI: {A: 20}\n"
        "    node_specific:\n      h1: {B: 99}\n      h2.x.y: {C: 3}\n",
    )
    envs = workspace.load().envs
    assert envs.for_host("h0", "A800") == {"A": "10", "B": "2"}
    assert envs.for_host("h1", "BI") == {"A": "20", "B": "99"}
    assert envs.for_host("h2", None) == {"A": "1", "B": "2"}
    assert envs.for_host("h2.x.y", None)["C"] == "3"


def test_runner_keys_are_loaded(workspace: Workspace) -> None:
    workspace.replace(
        "conf/train.yaml",
        "    nnodes: 1\n",
        "    nnodes: 1\n    type: ssh\n    no_shared_fs: true\n    hang_detection_timeout: 60\n"
        "    ssh_port: 2222\n    redirects: 3\n    monitor_interval: 5\n    local-addr: a b\n"
        "    virtual_local_rank: true\n    role: null\n    rdzv_id: 007\n",
    )
    runner = workspace.load().runner
    assert runner.type == "ssh"
    assert runner.redirects == "3"
    assert runner.rdzv_id == "007"
    assert runner.extra == {
        "monitor_interval": "5",
        "local_addr": "a b",
        "virtual_local_rank": None,
    }


def test_commands_and_options_are_loaded(workspace: Workspace) -> None:
    workspace.replace("conf/train.yaml", "action: run", "action: logs\nfollow: true\nlines: 5")
    workspace.replace(
        "conf/train.yaml",
        "  envs:\n",
        '  cmds:\n    before_start: |\n      echo "$HOME"\n      true\n'
        "    after_stop: null\n  envs:\n",
    )
    assert workspace.load().cmds == Commands(before_start='echo "$HOME"\ntrue\n')
    options = load(workspace.conf, "train", []).options
    assert options == Options(action="logs", follow=True, lines=5)


@pytest.mark.parametrize("size", [131_069, 100_000])
def test_long_environment_variable_is_accepted(workspace: Workspace, size: int) -> None:
    workspace.replace("conf/train.yaml", "CUDA_VISIBLE_DEVICES: 0,1", f"X: {'x' * size}")
    assert len(workspace.load().envs.common["X"]) == size


def test_escaped_shell_expansion_in_command(workspace: Workspace) -> None:
    workspace.replace("conf/train.yaml", "  envs:", "  cmds: {after_stop: '\\${X:0:2}'}\n  envs:")
    assert workspace.load().cmds.after_stop == "${X:0:2}"


def test_notify_section_is_loaded_and_redacted(workspace: Workspace) -> None:
    words = "notify: {webhook: 'https://chat/s3cr3t', on: [finished]}"
    workspace.replace("conf/train.yaml", "nnodes: 1", words)
    experiment = workspace.load("experiment.runner.notify.command=cat > /dev/null")
    notify = experiment.runner.notify
    assert notify is not None
    assert (notify.webhook, notify.on) == ("https://chat/s3cr3t", ("finished",))
    assert notify.command == "cat > /dev/null"
    assert "s3cr3t" not in repr(experiment)
    assert "s3cr3t" not in str(redact(experiment.resolved))


def test_shared_memory_directory_is_accepted(workspace: Workspace) -> None:
    assert workspace.load("experiment.exp_dir=/dev/shm/run").exp_dir == Path("/dev/shm/run")


def test_plan_does_not_need_local_data(workspace: Workspace) -> None:
    (workspace.root / "data/text.idx").unlink()
    with pytest.raises(ConfigError, match="no data set"):
        workspace.load()
    experiment = workspace.load("action=dryrun")
    assert [p.key for p in check_files(experiment)] == ["train.data.data_path"]


@pytest.mark.parametrize("action", ["stop", "query", "logs"])
def test_existing_run_is_found_with_invalid_arguments(workspace: Workspace, action: str) -> None:
    workspace.replace("conf/train/tiny.yaml", "num_layers: 4", "num_layres: 4")
    assert workspace.load(f"action={action}").exp_dir == workspace.root / "outputs demo"


def test_arguments_of_external_program_are_not_checked(workspace: Workspace) -> None:
    program = workspace.write("Megatron LM/pretrain_gpt.py", "")
    workspace.replace("conf/train.yaml", "type: train", f"entrypoint: {program}")
    workspace.replace(
        "conf/train/tiny.yaml", "num_layers: 4", "their_own: 4\n  context_parallel_size: 2"
    )
    workspace.replace("conf/train/tiny.yaml", "data/tokenizer", "meta-llama/Llama-3-8B")
    experiment = workspace.load()
    assert experiment.task.external
    assert experiment.task.entrypoint == program
    assert experiment.train.spelled["their_own"].value == 4
    assert experiment.train["tokenizer_path"] == "meta-llama/Llama-3-8B"


def test_duplicate_key_of_external_program_is_passed_once(workspace: Workspace) -> None:
    program = workspace.write("other.py", "")
    workspace.replace("conf/train.yaml", "type: train", f"entrypoint: {program}")
    experiment = workspace.load("+train.system.num_layers=3")
    assert [e.value for e in experiment.train if e.name == "num_layers"] == [3]


def test_relative_paths_are_resolved(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    home = workspace.root / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    experiment = workspace.load(
        "train.system.save=~/ckpt", "train.data.data_cache_path=./cache", "experiment.exp_dir=../x"
    )
    assert experiment.train["save"] == str(home / "ckpt")
    assert experiment.train["data_cache_path"] == str(workspace.root / "cache")
    assert experiment.exp_dir == workspace.root.parent / "x"


def test_blend_in_one_string_is_split(workspace: Workspace) -> None:
    workspace.replace("conf/train/tiny.yaml", "data/text", "0.3 data/text 7e-1 data/text")
    path = str(workspace.root / "data/text")
    assert workspace.load().train.spelled["data_path"].value == ["0.3", path, "7e-1", path]


def test_data_phases_are_loaded(workspace: Workspace) -> None:
    workspace.write("my data/t.bin", "")
    workspace.write("my data/t.idx", "")
    first_phase = "{samples: 100, data_path: [0.3, data/text, 0.7, my data/t]}"
    last_phase = "{tokens: 2e6, data_path: data/text}"
    workspace.replace(
        "conf/train/tiny.yaml",
        "data_path:",
        f"data_phases: [{first_phase}, {last_phase}]\n  data_path:",
    )
    root = workspace.root
    assert workspace.load().train.spelled["data_phases"].value == [
        f"samples=100 0.3 {root}/data/text 0.7 '{root}/my data/t'",
        f"tokens=2000000 {root}/data/text",
    ]
    (root / "my data/t.idx").unlink()
    with pytest.raises(ConfigError, match=r"train.data.data_phases: no data set .*/my data/t"):
        workspace.load()


def test_path_with_space_is_not_split(workspace: Workspace) -> None:
    workspace.write("my data/t.bin", "")
    workspace.write("my data/t.idx", "")
    workspace.replace("conf/train/tiny.yaml", "data/text", "my data/t")
    assert workspace.load().train.spelled["data_path"].value == str(workspace.root / "my data/t")


def test_builtin_entrypoint_from_any_directory(workspace: Workspace, tmp_path: Path) -> None:
    workspace.replace("conf/train.yaml", "type: train", "entrypoint: flagscale/train/train_gpt.py")
    assert workspace.load().task.entrypoint == OWN_PROGRAM


def test_unknown_section_of_override_has_location(workspace: Workspace) -> None:
    with pytest.raises(ConfigError) as error:
        workspace.load("+experiment.runer.x=1", "+foo=2")
    places = {problem.key: problem.where for problem in error.value.problems}
    assert places == {"experiment.runer": "override", "foo": "override"}
