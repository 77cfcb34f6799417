"""JSON schema of the YAML: what editors accept is what the launcher accepts."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from jsonschema import Draft7Validator
from support.field_experiments import EXPERIMENTS, ExperimentCase

from flagscale import cli
from flagscale.config.json_schema import experiment_schema, render, train_schema
from flagscale.config.schemas import DIRECTORY

if TYPE_CHECKING:
    from conftest import Workspace

PROJECT = Path(__file__).resolve().parents[3]
EXAMPLES = sorted((PROJECT / "examples").rglob("*.yaml"))
VALIDATORS = {
    "experiment": Draft7Validator(experiment_schema()),
    "train": Draft7Validator(train_schema()),
}
_LINE = re.compile(r"# yaml-language-server: \$schema=(\S+)\n")


def find_problems(data: Any, name: str = "experiment") -> list[str]:
    return [
        f"{'.'.join(map(str, error.absolute_path))}: {error.message}"
        for error in VALIDATORS[name].iter_errors(data)
    ]


def test_committed_schemas_are_up_to_date() -> None:
    """They are written by `python tools/config/reference.py`."""
    files = {path.name: path.read_text(encoding="utf-8") for path in DIRECTORY.glob("*.json")}
    assert files == render()


def test_schemas_are_schemas() -> None:
    for validator in VALIDATORS.values():
        Draft7Validator.check_schema(validator.schema)


@pytest.mark.parametrize("name", VALIDATORS)
def test_command_prints_schema(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["schema", name])
    assert (end.value.code, json.loads(capsys.readouterr().out)) == (0, VALIDATORS[name].schema)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(PROJECT)))
def test_example_names_its_schema_and_fits_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    line = _LINE.match(text)
    assert line is not None, text[:80]
    schema_file = (path.parent / line[1]).resolve()
    assert schema_file.parent == DIRECTORY
    name = schema_file.name.removesuffix(".schema.json")
    assert name == ("train" if path.parent.name == "train" else "experiment")
    assert find_problems(yaml.safe_load(text), name) == []


def test_experiment_of_tests_fits(workspace: Workspace) -> None:
    for file, name in (("train.yaml", "experiment"), ("train/tiny.yaml", "train")):
        text = (workspace.conf / file).read_text(encoding="utf-8")
        assert find_problems(yaml.safe_load(text), name) == []


# The schema has no arguments of other programs.
ACCEPTED_EXPERIMENTS = [
    name
    for name, case in EXPERIMENTS.items()
    if not case.expected_errors and case.program == ExperimentCase({}).program
]


@pytest.mark.parametrize("name", ACCEPTED_EXPERIMENTS)
def test_accepted_experiments_of_the_field_fit(name: str) -> None:
    values = {key: value for key, value in EXPERIMENTS[name].train.items() if value is not None}
    assert find_problems({"train": {"model": values}}) == []


ACCEPTED = {
    "interpolations": "experiment: {exp_name: 'x_${a.b}', exp_dir: '${oc.env:HOME}/x', runner: "
    "{nnodes: '${n}', nproc_per_node: '${n}', tee: '${t}', hosts: '${h}', max_restarts: '${r}'}}",
    "missing": "train: {model: {num_layers: '???', lr: '${x:y}', bf16: '${on}', seed: 1}}",
    "null": "train: {model: {num_layers: null, swiglu: null}, data: null}",
    "defaults": "defaults: [_self_, {train: 8b}, {override hydra/job_logging: disabled}]",
    "own key": "experiment: {base: /data, exp_dir: '${experiment.base}/x'}",
    "own section of anchors": "base: &base {lr: 1}\ntrain: {model: {optimizer: *base}}",
    "command as text": "experiment: {task: {type: command, command: 'echo 1'}}",
    "hosts": "experiment: {runner: {hosts: [a, 'b slots=4'], nnodes: '2:4'}}",
    "variables": "experiment: {envs: {A: 1, B: yes, device_type_specific: {X: {A: 2}}}}",
    "slurm": "experiment: {runner: {type: slurm, slurm: {nodes: 2, time: 1:00:00, "
    "extra: {hold: true}, device_type_specific: {A: {nodes: 1}}, container: {image: x}}}}",
    "sections of any name": "train: {system: {a: {b: {tensor_model_parallel_size: 2}}}}",
    "texts of numbers": "train: {model: {lr: 1e-4, num_layers: '4', swiglu: 'true', bf16: yes}}",
    "argument and section": "train: {model: {optimizer: adam, a: {optimizer: {lr: 1}}}}",
    "lists": "train: {data: {data_path: [0.5, a, 0.5, b], split: '9,1'}, model: "
    "{moe_layer_freq: '[0]+[1]*3', adam_beta1: 0.9}}",
    "negated": "train: {model: {no_swiglu: true, disable_bias_linear: true}}",
    "refused but off": "train: {model: {use_mup: false}}",
    "one host": "node_specific: {a: {python: /x, num_workers: 4, cmds: {before_start: x}}}",
    "action": "action: dryrun",
    "dashes": "train: {model: {num-layers: 4}}",
    "meshes": "train: {system: {hetero_process_meshes: [{tp: 2, layers: [3]}, {dp: 2}]}}",
    "torchrun": "experiment: {runner: {rdzv_conf: x, monitor_interval: 1}}",
}


@pytest.mark.parametrize("text", ACCEPTED.values(), ids=ACCEPTED)
def test_valid_yaml_fits(text: str) -> None:
    assert find_problems(yaml.safe_load(text)) == []


REJECTED = {
    "wrong key of the runner": "experiment: {runner: {nproc_per_nod: 1}}",
    "wrong key of the task": "experiment: {task: {typ: command}}",
    "wrong section": "experiment: {runer: {nnodes: 1}}",
    "wrong argument": "train: {model: {num_layres: 4}}",
    "wrong argument in a section": "train: {model: {optimizer: {lrr: 1}}}",
    "wrong section of train": "train: {modell: 3}",
    "text for a number": "train: {model: {num_layers: four}}",
    "number for a switch": "train: {model: {swiglu: 3}}",
    "section for a number": "train: {model: {num_layers: {a: 1}}}",
    "too small": "experiment: {runner: {nnodes: 0}}",
    "too large": "experiment: {runner: {master_port: 70000}}",
    "wrong choice": "experiment: {runner: {wait_for: redy}}",
    "wrong choice of an argument": "train: {model: {position_embedding_type: ropee}}",
    "wrong action": "action: stpo",
    "refused": "train: {model: {use_mup: true}}",
    "refused key": "train: {model: {most_recent_k: 3}}",
    "argument that may not differ": "node_specific: {a: {num_layers: 4}}",
    "list for a text": "experiment: {exp_name: [a]}",
    "list for variables": "experiment: {envs: {A: [1]}}",
}


@pytest.mark.parametrize("text", REJECTED.values(), ids=REJECTED)
def test_invalid_yaml_is_rejected(text: str) -> None:
    assert find_problems(yaml.safe_load(text))


def test_keys_have_descriptions_choices_and_defaults() -> None:
    schema = experiment_schema()
    wait_for = schema["properties"]["experiment"]["properties"]["runner"]["properties"]["wait_for"]
    assert wait_for["description"].startswith("State that `action=run` waits for")
    assert wait_for["default"] == "ready"
    assert wait_for["anyOf"][0] == {"enum": ["none", "joined", "ready", "step"]}
    arguments = schema["definitions"]["arguments"]["properties"]
    assert arguments["norm_epsilon"]["description"].startswith("Alias of layernorm_epsilon. ")
    assert all(content.get("description") for content in arguments.values())


def test_committed_train_schema_refers_to_the_other() -> None:
    content = json.loads((DIRECTORY / "train.schema.json").read_text(encoding="utf-8"))
    file, _, pointer = content["$ref"].partition("#/")
    target = json.loads((DIRECTORY / file).read_text(encoding="utf-8"))
    for part in pointer.split("/"):
        target = target[part]
    own = copy.deepcopy(train_schema())
    assert target == {key: own[key] for key in target}
