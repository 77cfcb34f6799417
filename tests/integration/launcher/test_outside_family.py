"""Tests of a model family from an installed package: check, plan and training.

The hosts of the fixture ``bed`` (tests/bed) are namespaces of this machine, each with a real sshd.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from bed.lab import Bed
from support.launch_lab import PROJECT, Lab
from support.ssh_lab import ssh_lab

from flagscale.status import list_status_files, read_events

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.torch]

OUTSIDE = PROJECT / "tests" / "outside"
TRAIN_GPT = PROJECT / "flagscale" / "train" / "train_gpt.py"
TRAIN: dict[str, Any] = {
    "system": {"device": "cpu", "logging": {"log_interval": 1, "tensorboard_dir": None}},
    "model": {
        **{"family": "averages", "num_layers": 1, "hidden_size": 32, "num_attention_heads": 4},
        "untie_embeddings_and_output_weights": True,
        **{"seq_length": 16, "micro_batch_size": 1, "global_batch_size": 4, "train_iters": 3},
        "optimizer": {"lr": 1.0e-2, "lr_decay_style": "constant"},
        "eval_iters": 0,
    },
    "data": {"mock_data": True, "vocab_size": 100, "num_workers": 0},
}


def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the family's package like pip, and return the directory."""
    site = tmp_path / "a site's $packages"
    about = site / "averages-1.0.dist-info"
    about.mkdir(parents=True)
    for name in ("averages.py", "averages_model.py"):
        shutil.copy(OUTSIDE / name, site)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: averages\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[flagscale.models]\naverages = averages:Averages\nbroken = averages:Nothing\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), str(PROJECT)]))
    return site


@pytest.fixture
def configured_lab(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """Configure an experiment of the family."""
    install(tmp_path, monkeypatch)
    lab.configure("", task={"entrypoint": str(TRAIN_GPT)}, runner={"nproc_per_node": 2})
    path = lab.root / "conf" / "lab.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "train": TRAIN}))
    return lab


def test_training_of_an_installed_family(configured_lab: Lab) -> None:
    """It continues from its checkpoint; its arithmetic is unknown to the estimate."""
    planned = configured_lab.run_action("dryrun")
    assert planned.returncode == 0, planned.stderr
    assert "averages" in planned.stdout
    result = configured_lab.run_action("test", "train.system.exit_interval=2", timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
    assert [step.get("step") for step in progress(configured_lab)] == [1, 2]
    losses = [step.get("loss") for step in progress(configured_lab)]
    assert losses[-1] < losses[0]
    assert {step.get("mfu") for step in progress(configured_lab)} == {None}
    second_result = configured_lab.run_action("test", timeout=240)
    assert second_result.returncode == 0, second_result.stdout + second_result.stderr
    assert [step.get("step") for step in progress(configured_lab)] == [3]


def progress(lab: Lab) -> list[Any]:
    (host,) = lab.state().hosts
    events = [
        e for file in list_status_files(host.run_dir / "status") for e in read_events(file)[0]
    ]
    return [event for event in events if event.event == "progress"]


@pytest.mark.bed(hosts=2)
def test_host_without_the_package_is_reported(
    bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything starts on it."""
    site = install(tmp_path, monkeypatch)
    with ssh_lab(bed, tmp_path / "lab") as lab:
        lab.configure(
            light=False,
            task={"entrypoint": str(TRAIN_GPT)},
            envs={"node_specific": {"h00": {"PYTHONPATH": str(site)}}},
            top={"train": TRAIN},
        )
        result = lab.run_action("check")
        assert result.returncode == 2, result.stdout + result.stderr
        rows = [
            line for line in result.stdout.splitlines() if line.strip(" │").startswith("family")
        ]
        assert [("ok" in row, "h00" in row) for row in rows] == [(True, True), (False, False)]
        assert "no family of models is called 'averages'; known: gpt, bert" in result.stdout


@pytest.mark.parametrize(
    ("action", "override", "message"),
    [
        pytest.param(
            "dryrun",
            "train.system.tensor_model_parallel_size=2",
            "tensor_model_parallel_size: 2 is not supported by family: averages:",
            id="layout",
        ),
        pytest.param(
            "dryrun",
            "train.model.untie_embeddings_and_output_weights=false",
            "false: a model of averages has an output of its own; write true",
            id="own-rule",
        ),
        pytest.param(
            "dryrun",
            "train.model.family=average",
            "no family of models is called 'average'; known: gpt, bert, averages, broken",
            id="unknown",
        ),
        pytest.param("dryrun", "train.model.family=broken", "averages: ", id="does-not-load"),
        pytest.param(
            "estimate",
            "train.model.train_iters=3",
            "family: averages: its layers are not described",
            id="estimate",
        ),
    ],
)
def test_unsupported_features_are_rejected_before_the_start(
    configured_lab: Lab, action: str, override: str, message: str
) -> None:
    result = configured_lab.run_action(action, override)
    assert result.returncode == 2, result.stdout
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_data_function_is_checked_before_the_start(lab: Lab) -> None:
    """The host's preflight reports it, from the environment of the host's ranks."""
    fields = {
        "dataloader_type": "external",
        "external_data": "own_data.web:batch",
        "num_workers": 0,
    }
    train = {**TRAIN, "data": {**fields, "tokenizer_type": "NullTokenizer", "vocab_size": 100}}
    train["model"] = {key: value for key, value in TRAIN["model"].items() if key != "family"}
    package = lab.root / "some packages" / "own_data"
    lab.configure("", task={"entrypoint": str(TRAIN_GPT)}, envs={"PYTHONPATH": str(package.parent)})
    path = lab.root / "conf" / "lab.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "train": train}))
    result = lab.run_action("run")
    assert result.returncode == 2, result.stdout
    key = "train.data.external_data"
    assert f"{key}: there is no module own_data.web" in result.stderr, result.stderr
    package.mkdir(parents=True)
    (package / "web.py").write_text("def batches(args, tokenizer, split, samples): ...\n")
    result = lab.run_action("run")
    assert f"{key}: own_data.web has no function batch" in result.stderr, result.stderr
    assert "did you mean batches?" in result.stderr
    assert "Traceback" not in result.stderr
    assert lab.run_action("check", f"{key}=own_data.web:batches").returncode == 0
