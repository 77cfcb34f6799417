"""Configuration errors: each is reported with its location, and all of them at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from flagscale.errors import ConfigError

if TYPE_CHECKING:
    from conftest import Workspace

EXPERIMENT_PROBLEMS = {
    "missing-name": ("  exp_name: demo\n", "", "experiment.exp_name: is required"),
    "missing-value": ("exp_name: demo", "exp_name: ???", "exp_name: is required"),
    "no-interpolation": ("exp_name: demo", "exp_name: ${nowhere}", "nowhere"),
    "name-is-a-section": ("exp_name: demo", "exp_name: {a: 1}", "expected a text"),
    "unknown-key": (
        "  exp_name: demo\n",
        "  exp_name: x\n  exp_dri: y\n",
        "did you mean 'exp_dir'",
    ),
    "key-of-another-section": (
        "  exp_name: demo\n",
        "  exp_name: x\n  nnodes: 4\n",
        "experiment.nnodes: unknown key; did you mean 'experiment.runner.nnodes'?",
    ),
    "unknown-section": (
        "  runner:\n",
        "  runnner: {}\n  runner:\n",
        "experiment.runnner: unknown key; did you mean 'runner'",
    ),
    "unknown-envs": ("  envs:\n", "  env: {}\n  envs:\n", "did you mean 'envs'"),
    "unknown-notify": ("nnodes: 1", "notfy: {command: c}", "did you mean 'notify'"),
    "unknown-top": ("action: run", "action: run\nexperimnt: 1", "did you mean 'experiment'"),
    "bad-action": ("action: run", "action: rnu", "expected one of run, dryrun"),
    "no-entrypoint": ("type: train", "entrypoint: no/such.py", "no file no/such.py"),
    "program-of-flagscale": (
        "type: train",
        "entrypoint: ./flagscale/train/train_other.py",
        "train_gpt.py is this project's only program: give the path of another",
    ),
    "images-of-flagscale": (
        "type: train",
        "entrypoint: ./flagscale/train/megatron/train_llava.py",
        "FlagScale's program for models of images and text (LLaVA), which this project does not",
    ),
    "robots-of-flagscale": (
        "type: train",
        "entrypoint: flagscale/train/train_pi.py",
        "FlagScale's program for models of robots (pi0)",
    ),
    "conversations-of-flagscale": (
        "type: train",
        "entrypoint: flagscale/train/train_aquila_sft.py",
        "`sft: true` trains on conversations",
    ),
    "unknown-heartbeat": (
        "nnodes: 1",
        "heartbeat: {enabled: true, proces_timeout_s: 3}",
        "did you mean 'process_timeout_s'",
    ),
    "tracing-no-section": ("nnodes: 1", "tracing: true", "expected a section with keys, found"),
    "task-type": ("type: train", "type: eval", "expected one of train, command, found 'eval'"),
    "serving": (
        "type: train",
        "type: serve",
        "supported; `export_huggingface` writes a model for vLLM",
    ),
    "robots": (
        "type: train",
        "backend: pi0",
        "'pi0' is not supported: FlagScale's robotics trainer",
    ),
    "interval-for-ever": (
        "nnodes: 1",
        "monitor_interval: .inf",
        "runner.monitor_interval: expected a number from 0.001 to 3600, found '.inf'",
    ),
    "interval-too-large": (
        "nnodes: 1",
        "monitor_interval: 1e400",
        "from 0.001 to 3600, found '1e400'",
    ),
    "shutdown-timeout": (
        "nnodes: 1",
        "shutdown_timeout: soon",
        "expected a whole number from 0 to 30000000",
    ),
    "start-method": (
        "nnodes: 1",
        "start_method: frok",
        "fork, forkserver, found 'frok'; did you mean 'fork'",
    ),
    "switch-of-torchrun": (
        "nnodes: 1",
        "virtual_local_rank: 7",
        "virtual_local_rank: expected true or false",
    ),
    "wait-for-ever": (
        "nnodes: 1",
        "stop_grace: 1e300",
        "expected a number from 0 to 30000000, found 1e+300",
    ),
    "start-for-ever": ("nnodes: 1", "start_timeout: .inf", "expected a number from 1 to 30000000"),
    "many-ranks": ("nproc_per_node: 2", "nproc_per_node: 999999999999", "from 1 to 65536"),
    "many-restarts": ("nnodes: 1", "max_restarts: 99999999999999999999", "from 0 to 1000000"),
    "nnodes-zero": ("nnodes: 1", "nnodes: 0", "from 1 to 1000000, found '0'"),
    "nnodes-text": ("nnodes: 1", "nnodes: two", "whole number"),
    "nnodes-without-hosts": (
        "nnodes: 1",
        "nnodes: 4",
        "4 hosts, but no `hostfile` or `hosts` that lists them",
    ),
    "job-of-its-own": (
        "nnodes: 1",
        "hostfile: hostfile\n    per_node_task: true",
        "per_node_task: true: the hosts of a run execute one job together",
    ),
    "nproc": ("nproc_per_node: 2", "nproc_per_node: gpu", "expected a whole number"),
    "hosts and hostfile": (
        "nnodes: 1",
        "hostfile: hostfile\n    hosts: [h0]",
        "hosts: names the hosts, as `hostfile` does; remove one",
    ),
    "hostfile": ("nnodes: 1", "hostfile: no/hosts", "no file no/hosts"),
    "port": ("nnodes: 1", "master_port: 70000", "from 1 to 65535, found 70000"),
    "empty-exp-dir": ("exp_dir: ./outputs demo", "exp_dir: ''", "expected a path, found an empty"),
    "near-action": ("action: run", "action: stopp", "found 'stopp'; did you mean 'stop'?"),
    "shell-variable": (
        "exp_name: demo",
        "exp_name: ${HOME}",
        "conf/train.yaml:5: experiment.exp_name: Interpolation key 'HOME' not found; "
        "write ${oc.env:HOME} for this machine's variable",
    ),
    "runner-type": ("nnodes: 1", "type: shh", "expected one of local, ssh"),
    "runner-backend": ("nnodes: 1", "backend: deepspeed", "expected one of torchrun"),
    "leave-and-restart": (
        "nnodes: 1",
        "on_failure: leave\n    max_restarts: 1",
        "`leave` lets the other hosts continue",
    ),
    "on-failure": ("nnodes: 1", "on_failure: panic", "expected one of stop, leave"),
    "spares-for-nothing": (
        "nnodes: 1",
        "hostfile: hostfile\n    spares: 1",
        "spares: they would wait for nothing: set `on_bad_host: replace`",
    ),
    "replace-without-spares": (
        "nnodes: 1",
        "on_bad_host: replace",
        "on_bad_host: `replace` needs hosts that wait: set `spares`",
    ),
    "spares-without-hosts": (
        "nnodes: 1",
        "type: ssh\n    spares: 1\n    on_bad_host: replace",
        "spares: they are hosts of the `hostfile` or of `hosts`, and neither is set",
    ),
    "spares-of-another-runner": (
        "nnodes: 1",
        "type: cloud\n    spares: 1\n    on_bad_host: replace",
        "spares: not supported with `type: cloud`, only with `type: ssh` or `type: slurm`",
    ),
    "spares-and-leave": (
        "nnodes: 1",
        "hostfile: hostfile\n    on_failure: leave\n    spares: 1\n    on_bad_host: replace",
        "on_failure: `leave` lets the other hosts continue, so no host can be replaced",
    ),
    "shrink-without-numbers": (
        "nnodes: 1",
        "hostfile: hostfile\n    nnodes: 2\n    on_bad_host: shrink",
        "on_bad_host: `shrink` needs the smallest and the largest number of hosts: `nnodes: a:b`",
    ),
    "shrink-upwards": (
        "nnodes: 1",
        "hostfile: hostfile\n    nnodes: 4:2\n    on_bad_host: shrink",
        "nnodes: expected a:b with a from 1 and below b, found 4:2",
    ),
    "shrink-in-a-pod": (
        "nnodes: 1",
        "type: cloud\n    nnodes: 2:4\n    on_bad_host: shrink",
        "on_bad_host: not supported with `type: cloud`, only with `type: ssh` or `type: slurm`",
    ),
    "spares-in-a-heterogeneous-job": (
        "nnodes: 1",
        "type: slurm\n    spares: 1\n    on_bad_host: replace\n"
        "    slurm: {device_type_specific: {A: {nodes: 4}}}",
        "on_bad_host: `replace` is not supported with experiment.runner.slurm.device_type_specific",
    ),
    "more-spares-than-slurm-has-nodes": (
        "nnodes: 1",
        "type: slurm\n    nnodes: 65536\n    spares: 1\n    on_bad_host: replace",
        "spares: Slurm has 65,536 nodes at most, with those that train",
    ),
    "one-port": (
        "nnodes: 1",
        "master_port: 5000\n    liveness_port: 5000",
        "equals `master_port`",
    ),
    "metrics-port": (
        "nnodes: 1",
        "master_port: 5000\n    metrics_port: 5000",
        "equals `master_port` or `liveness_port`",
    ),
    "notify-nobody": ("nnodes: 1", "notify: {on: [failed]}", "expected a `command`, a `webhook`"),
    "notify-of-what": (
        "nnodes: 1",
        "notify: {command: c, on: [failed, fail]}",
        "each item one of failed, stalled",
    ),
    "notify-key": ("nnodes: 1", "notify: {commmand: c, command: c}", "did you mean 'command'"),
    "notify-address": ("nnodes: 1", "notify: {webhook: ftp-s3cr3t}", "begins with https://"),
    "c10d": ("nnodes: 1", "rdzv_backend: c10d", "expected one of static"),
    "endpoint": ("nnodes: 1", "rdzv_endpoint: h", "expected host:port"),
    "torchrun-typo": ("nnodes: 1", "monitor_intervall: 1", "did you mean 'monitor_interval'"),
    "node-rank": ("nnodes: 1", "node_rank: 1", "the launcher numbers the hosts in the order of"),
    "cloud-hosts": (
        "nnodes: 1",
        "type: cloud\n    hostfile: hostfile",
        "has no meaning with `type: cloud`: every host starts its own part",
    ),
    "torchrun-map": ("nnodes: 1", "rdzv_conf: {a: 1}", "expected one value"),
    "runner-list": ("    nnodes: 1\n    nproc_per_node: 2\n", "    - 1\n", "expected a section"),
    "env-list": ("CUDA_VISIBLE_DEVICES: 0,1", "X: [0, 1]", "found a list; write 0,1"),
    "env-map": ("CUDA_VISIBLE_DEVICES: 0,1", "device_type: {a: 1}", "found a section"),
    "env-name": ("CUDA_VISIBLE_DEVICES: 0,1", "A-B: 1", "cannot be the name of a variable"),
    "argument-of-one-type": (
        "action: run",
        "device_type_specific: {A800: {num_layerss: 2}}",
        "device_type_specific.A800.num_layerss: unknown argument",
    ),
    "argument-of-the-whole-job": (
        "action: run",
        "node_specific: {h1: {model: {num_layers: 2}}}",
        "node_specific.h1.model.num_layers: has to be the same on every host",
    ),
    "secret-of-one-host": (
        "action: run",
        "node_specific: {h1: {wandb_api_key: abc}}",
        "node_specific.h1.wandb_api_key: looks like a secret",
    ),
    "train-section": ("action: run", "train: {modle: {}}", "did you mean 'model'"),
    "nul-in-the-name": ("exp_name: demo", 'exp_name: "a\\0b"', "exp_name: cannot hold a NUL"),
    "nul-in-a-path": ("exp_dir: ./outputs demo", 'exp_dir: "a\\0b"', "exp_dir: cannot hold a NUL"),
    "nul-in-a-command": ("  envs:", '  cmds: {after_stop: "\\0"}\n  envs:', "cannot hold a NUL"),
    "nul-in-a-variable": ("CUDA_VISIBLE_DEVICES: 0,1", 'X: "\\0"', "envs.X: cannot hold a NUL"),
    "control-in-the-name": (
        "exp_name: demo",
        'exp_name: "a\\e[31mb"',
        r"expected printable text, found the character '\x1b'",
    ),
    "bidirectional-name": (
        "exp_name: demo",
        'exp_name: "a\\u202Eb"',
        r"expected printable text, found the character '\u202e'",
    ),
    "long-name": (
        "exp_name: demo",
        f"exp_name: {'é' * 128}",
        "is 256 bytes long; expected at most",
    ),
    "very-long-name": ("exp_name: demo", f"exp_name: {'x' * 200_000}", "is 200,000 bytes long"),
    "long-variable": (
        "CUDA_VISIBLE_DEVICES: 0,1",
        f"X: {'x' * 131_070}",
        "envs.X: is 131,072 bytes long; expected at most 131,071",
    ),
    "long-directory": (
        "exp_dir: ./outputs demo",
        f"exp_dir: a/{'x' * 256}/b",
        "exp_dir: a name in it is 256 bytes long; expected at most 255",
    ),
    "deep-directory": (
        "exp_dir: ./outputs demo",
        f"exp_dir: /{'x/' * 2000}",
        "exp_dir: is 4,000 bytes long; expected at most 3,584",
    ),
    "no-program": ("type: train", "entrypoint: hostfile", "expected a Python program, *.py, found"),
    "host-variable": (
        "CUDA_VISIBLE_DEVICES: 0,1",
        "PATH: /opt/x/bin:${PATH}",
        "write ${host:PATH} for the host's own variable, ${oc.env:PATH} for this machine's",
    ),
    "shell-in-a-command": (
        "  envs:",
        "  cmds: {before_start: 'echo ${X:0:2}'}\n  envs:",
        "for the shell's variable write \\${X:0:2}",
    ),
    "variable-in-a-command": (
        "  envs:",
        "  cmds: {before_start: 'echo ${X}'}\n  envs:",
        "for the shell's variable write $X or \\${X}",
    ),
    "near-interpolation": (
        "exp_name: demo",
        "exp_name: ${experiment.exp_dri}",
        "not found; did you mean ${experiment.exp_dir}?",
    ),
}


@pytest.mark.parametrize(
    ("old", "new", "message"), EXPERIMENT_PROBLEMS.values(), ids=EXPERIMENT_PROBLEMS
)
def test_invalid_experiment_is_rejected(
    workspace: Workspace, old: str, new: str, message: str
) -> None:
    workspace.replace("conf/train.yaml", old, new)
    with pytest.raises(ConfigError) as error:
        workspace.load()
    assert message in str(error.value)
    assert error.value.exit_code == 2
    assert len(error.value.problems) == 1
    assert (error.value.problems[0].where or "").startswith("conf/train.yaml")


@pytest.mark.parametrize(
    ("save", "is_in_reach"),
    [
        pytest.param((), False, id="default"),
        pytest.param(("+train.system.checkpoint.save=checkpoints",), False, id="own-disk"),
        pytest.param(("+train.system.checkpoint.save=s3://bucket/run",), True, id="object-storage"),
        pytest.param(("+train.system.checkpoint.save=null",), True, id="none"),
    ],
)
def test_spare_without_shared_files_needs_checkpoints_within_reach(
    workspace: Workspace, save: tuple[str, ...], is_in_reach: bool
) -> None:
    runner = "hostfile: hostfile\n    no_shared_fs: true\n    spares: 1\n    on_bad_host: replace"
    workspace.replace("conf/train.yaml", "nnodes: 1", runner)
    if is_in_reach:
        workspace.load(*save)
        return
    with pytest.raises(ConfigError, match="another host could not read checkpoints") as error:
        workspace.load(*save)
    assert [problem.key.split(".")[-1] for problem in error.value.problems] == ["save"]


TRAIN_PROBLEMS = {
    "unknown": ("num_layers: 4", "num_layres: 4\n  num_layers: 4", 6, "did you mean 'num_layers'"),
    "type": ("num_layers: 4", "num_layers: four", 6, "whole number not less than 1, found 'four'"),
    "bound": ("num_layers: 4", "num_layers: 0", 6, "not less than 1, found 0"),
    "list": ("num_layers: 4", "num_layers: [4]", 6, "expected a whole number"),
    "choice": ("num_layers: 4", "num_layers: 4\n  normalization: Batch", 7, "LayerNorm, RMSNorm"),
    "bool": ("bf16: true", "bf16: 2", 4, "expected true or false, found 2"),
    "number-for-bool": ("num_layers: 4", "num_layers: true", 6, "whole number"),
    "twice": ("bf16: true", "bf16: true\n  bf16: false", 5, "'bf16' is given twice: false here"),
    "contradiction": (
        "num_layers: 4",
        "num_layers: 4\n  norm_epsilon: 1e-5\n  layernorm_epsilon: 1e-6",
        8,
        "contradicts train.model.norm_epsilon",
    ),
    "derived": ("bf16: true", "params_dtype: bf16", 4, "follows from `bf16`"),
    "map-in-list": ("num_layers: 4", "num_layers: 4\n  recompute_modules: [{a: 1}]", 7, "a list"),
    "map-in-blend": ("data_path: data/text", "data_path: [{a: 1}]", 16, "found [{'a': 1}]"),
    "no-data": ("data_path: data/text", "data_path: data/other", 16, "existing data sets:"),
    "data-suffix": ("data_path: data/text", "data_path: data/text.bin", 16, "without .bin"),
    "blend": ("data_path: data/text", "data_path: [0.3, data/text, 0.7, data/b]", 16, "data/b"),
    "blend-weights": (
        "data_path: data/text",
        "data_path: [0.3, data/text, 0.7]",
        16,
        "after the weight 0.7, found the end",
    ),
    "no-tokenizer": ("data/tokenizer", "data/none", 18, "no file or directory"),
}


@pytest.mark.parametrize(
    ("old", "new", "line", "message"), TRAIN_PROBLEMS.values(), ids=TRAIN_PROBLEMS
)
def test_invalid_train_argument_is_rejected(
    workspace: Workspace, old: str, new: str, line: int, message: str
) -> None:
    workspace.replace("conf/train/tiny.yaml", old, new)
    with pytest.raises(ConfigError) as error:
        workspace.load()
    assert message in str(error.value)
    assert [p.where for p in error.value.problems] == [f"conf/train/tiny.yaml:{line}"]


@pytest.mark.parametrize(
    ("override", "place"),
    [
        ("experiment.exp_dir=/proc/self/runs", "/proc"),
        ("experiment.exp_dir=/sys", "/sys"),
        ("experiment.exp_dir=/tmp/../dev/null", "/dev"),
        ("+experiment.runner.log_dir=/proc/logs", "/proc"),
        ("+train.system.checkpoint.save=/dev/checkpoints", "/dev"),
    ],
)
def test_kernel_directory_is_rejected(workspace: Workspace, override: str, place: str) -> None:
    with pytest.raises(ConfigError) as error:
        workspace.load(override)
    assert [p.key for p in error.value.problems] == [override.lstrip("+").partition("=")[0]]
    assert f"is in {place}, a pseudo file system of the kernel" in str(error.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        pytest.param("save='s3://id:xyzzy@b/a'", "a user and a password is refused", id="login"),
        pytest.param("load='s3://b/a?k=xyzzy'", "without ? and #", id="query"),
        pytest.param("load=https://host/a", "https:// cannot be written", id="https"),
        *(
            pytest.param(
                f"{name}=s3://b/xyzzy",
                "found an address of object storage, which only save and load may be",
                id=name,
            )
            for name in ("tensorboard_dir", "save_staging_dir", "pretrained_checkpoint")
        ),
    ],
)
def test_unusable_address_is_rejected(workspace: Workspace, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        workspace.load(f"+train.system.checkpoint.{override}")
    assert message in str(error.value)
    assert "xyzzy" not in str(error.value)


@pytest.mark.parametrize("name", ["save", "load", "tensorboard_dir"])
@pytest.mark.parametrize("value", ["''", "false", "true"])
def test_boolean_or_empty_directory_is_rejected(
    workspace: Workspace, name: str, value: str
) -> None:
    override = f"+train.system.checkpoint.{name}={value}"
    with pytest.raises(ConfigError) as error:
        workspace.load(override)
    (problem,) = error.value.problems
    text = value.strip("'")
    assert problem.key == f"train.system.checkpoint.{name}"
    assert problem.message == f"expected a directory, found {text!r}; to disable it, use null"
    experiment = workspace.load(f"+train.system.checkpoint.{name}=./false")
    assert experiment.train.spelled[name].value.endswith("/false")


@pytest.mark.parametrize("value", ["1e400", ".inf", "-.inf", "inf"])
def test_infinite_timeout_is_rejected(workspace: Workspace, value: str) -> None:
    with pytest.raises(ConfigError) as error:
        workspace.load(f"+experiment.runner.lost_host_timeout={value}")
    assert [p.key for p in error.value.problems] == ["experiment.runner.lost_host_timeout"]
    assert "expected a number" in str(error.value)


def test_all_errors_are_reported_at_once(workspace: Workspace) -> None:
    workspace.replace("conf/train.yaml", "nnodes: 1", "nnodes: 0\n    nmaster: x")
    workspace.replace("conf/train/tiny.yaml", "num_layers: 4", "num_layers: x\n  hiden_size: 3")
    with pytest.raises(ConfigError) as error:
        workspace.load("train.model.seq_length=-1")
    assert [p.key for p in error.value.problems] == [
        "experiment.runner.nnodes",
        "experiment.runner.nmaster",
        "train.model.num_layers",
        "train.model.hiden_size",
        "train.model.seq_length",
    ]
    assert error.value.problems[-1].where == "override"


def test_a_misspelled_section_precedes_what_follows_from_it(workspace: Workspace) -> None:
    workspace.replace("conf/train.yaml", "experiment:", "experimnet:")
    workspace.replace("conf/train.yaml", "exp_name: demo", "exp_name: demo\n  x: ${experiment.y}")
    with pytest.raises(ConfigError) as error:
        workspace.load()
    first, second = error.value.problems
    assert str(first) == "conf/train.yaml:4: experimnet: unknown key; did you mean 'experiment'?"
    assert "Interpolation key 'experiment.y' not found" in str(second)


def test_all_unresolved_interpolations_are_reported(workspace: Workspace) -> None:
    workspace.replace("conf/train.yaml", "exp_name: demo", "exp_name: ${A}")
    workspace.replace("conf/train.yaml", "0,1", "${B}\n    C: ???\n    FINE: ${experiment.exp_dir}")
    workspace.replace("conf/train/tiny.yaml", "num_layers: 4", "num_layers: ${model.layers}")
    workspace.replace("conf/train/tiny.yaml", "data/text", "[0.5, a, 0.5, '${D}']")
    with pytest.raises(ConfigError) as error:
        workspace.load("+foo=1", "bar=2")
    assert [p.key for p in error.value.problems] == [
        "bar",
        "foo",
        "experiment.exp_name",
        "experiment.envs.CUDA_VISIBLE_DEVICES",
        "experiment.envs.C",
        "train.model.num_layers",
        "train.data.data_path.3",
    ]


@pytest.mark.parametrize(
    ("old", "new", "keys"),
    [
        pytest.param(
            "  runner:\n    nnodes: 1\n    nproc_per_node: 2\n",
            "  runner: [1]\n  exp_nmae: x\n",
            ["experiment.exp_nmae", "experiment.runner", "train.model.num_layres"],
            id="runner",
        ),
        pytest.param(
            "  exp_name: demo\n",
            "  exp_name: {a: 1}\n",
            ["experiment.exp_name", "train.model.num_layres"],
            id="name",
        ),
        pytest.param(
            "  - train: tiny\n", "train: 5\n", ["train"], id="nothing-is-missing-in-no-section"
        ),
    ],
)
def test_wrong_type_does_not_hide_other_errors(
    workspace: Workspace, old: str, new: str, keys: list[str]
) -> None:
    workspace.replace("conf/train/tiny.yaml", "num_layers: 4", "num_layers: 4\n  num_layres: 4")
    workspace.replace("conf/train.yaml", old, new)
    with pytest.raises(ConfigError) as error:
        workspace.load()
    assert [p.key for p in error.value.problems] == keys


def test_scalar_experiment_does_not_hide_other_errors(workspace: Workspace) -> None:
    workspace.write(
        "conf/train.yaml", "defaults:\n  - _self_\n  - train: tiny\nexperiment: 5\nfoo: 1\n"
    )
    workspace.replace("conf/train/tiny.yaml", "num_layers: 4", "num_layres: 4")
    with pytest.raises(ConfigError) as error:
        workspace.load()
    assert [p.key for p in error.value.problems] == ["foo", "experiment", "train.model.num_layres"]


def test_all_invalid_overrides_are_reported(workspace: Workspace) -> None:
    with pytest.raises(ConfigError) as error:
        workspace.load("experiment.exp_nmae=x", "experiment.runner=3", "train.model.num_layers=x")
    assert [p.key for p in error.value.problems] == [
        "experiment.exp_nmae",
        "experiment.runner",
        "train.model.num_layers",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param('"a\\0b"', "cannot hold a NUL character", id="nul"),
        pytest.param("x" * 200_000, r"is 200,\d\d\d bytes long", id="long"),
    ],
)
def test_argument_that_cannot_be_passed_is_rejected(
    workspace: Workspace, text: str, message: str
) -> None:
    workspace.replace("conf/train/tiny.yaml", "data/tokenizer", text)
    with pytest.raises(ConfigError, match=message) as error:
        workspace.load(purpose="plan")
    assert [p.key for p in error.value.problems] == ["train.data.tokenizer.tokenizer_path"]


def test_too_long_directory_name_is_rejected(workspace: Workspace) -> None:
    with pytest.raises(ConfigError, match="a name in it is 256 bytes long") as error:
        workspace.load(f"train.system.save=/a/{'x' * 256}")
    assert [p.key for p in error.value.problems] == ["train.system.save"]
