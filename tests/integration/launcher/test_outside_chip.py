"""Tests of a device type from an installed package: training, probing and benchmarks.

The hosts of the fixture ``bed`` (tests/bed) are namespaces of this machine, each with a real sshd.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from bed.lab import Bed
from support.launch_lab import PROJECT, Lab
from support.ssh_lab import ssh_lab

from flagscale.status import list_status_files, read_events

pytestmark = [pytest.mark.integration, pytest.mark.torch]

CHIP = PROJECT / "tests" / "outside" / "chip.py"
TRAIN_GPT = PROJECT / "flagscale" / "train" / "train_gpt.py"
TINY = {
    "system": {
        "device": "auto",
        "precision": {"bf16": False},
        "logging": {"log_interval": 1, "save": None, "load": None, "tensorboard_dir": None},
    },
    "model": {
        **{"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16},
        **{"micro_batch_size": 1, "global_batch_size": 4, "train_iters": 2, "eval_iters": 0},
        **{"position_embedding_type": "rope", "normalization": "RMSNorm"},
        "optimizer": {"lr": 1.0e-3, "lr_decay_style": "constant"},
    },
    "data": {"mock_data": True, "vocab_size": 100, "num_workers": 0},
}

SHOWING = """
import os
values = (os.environ.get(name) for name in ("DEMO_READY", "TORCHDYNAMO_DISABLE"))
print("ready:", *values, flush=True)
"""

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install the package like pip, in a directory whose name needs quoting in a shell.

    Keyword arguments are the numbers of devices by host.
    """

    def do(**chips: int) -> Path:
        site = tmp_path / "a site's $packages"
        about = site / "chip-1.0.dist-info"
        about.mkdir(parents=True)
        shutil.copy(CHIP, site)
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: chip\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text("[flagscale.accelerators]\ndemo = chip:Demo\n")
        for host, count in chips.items():
            for number in range(count):
                chip = site / "chips" / host / str(number)
                chip.parent.mkdir(parents=True, exist_ok=True)
                chip.touch()
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), str(PROJECT)]))
        return site

    return do


def test_training_on_an_installed_device_type(lab: Lab, install: Install) -> None:
    """Ranks follow the host's devices and its visibility variable; ``auto`` selects the type."""
    install(**{socket.gethostname(): 3})
    runner = {"nproc_per_node": "auto"}
    task = {"entrypoint": str(TRAIN_GPT)}
    lab.configure("", task=task, runner=runner, envs={"DEMO_VISIBLE_DEVICES": "0,2"})
    path = lab.root / "conf" / "lab.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "train": TINY}))
    result = lab.run_action("test", timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
    (host,) = lab.state().hosts
    events = [
        e for file in list_status_files(host.run_dir / "status") for e in read_events(file)[0]
    ]
    started_devices = [(e.rank, e.get("device")) for e in events if e.event == "started"]
    assert sorted(started_devices) == [(0, "demo"), (1, "demo")]
    assert {e.get("backend") for e in events if e.event == "joined"} == {"gloo"}
    steps = [e for e in events if e.event == "progress"]
    assert [e.get("step") for e in steps] == [1, 2]
    plan = json.loads(lab.layout.plan.read_text(encoding="utf-8"))
    values = {
        variable["name"]: variable.get("value") for variable in plan["hosts"][0]["environment"]
    }
    assert values["DEMO_READY"] == "it's"
    assert "TORCHDYNAMO_DISABLE" not in values


def test_unknown_device_type_lists_the_available_ones(lab: Lab, install: Install) -> None:
    install()
    lab.configure("", task={"entrypoint": str(TRAIN_GPT)})
    path = lab.root / "conf" / "lab.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "train": TINY}))
    result = lab.run_action("dryrun", "train.system.device=domo")
    assert result.returncode == 2
    text = "train.system.device: no kind of device is called 'domo'; known: auto, cpu, cuda, demo"
    assert text in result.stderr


@pytest.mark.bed(hosts=2)
def test_hosts_over_ssh_report_their_devices(bed: Bed, tmp_path: Path, install: Install) -> None:
    """Their shells count the devices; the package is not installed there."""
    site = install(h00=2, h01=3)
    with ssh_lab(bed, tmp_path / "lab") as lab:
        hostfile = "h00 slots=4 type=Demo-9000\nh01 slots=4 type=cuda\n"
        lab.configure(SHOWING, hostfile=hostfile, runner={"nproc_per_node": "auto"})
        checked = lab.run_action("check")
        output = checked.stdout + checked.stderr
        assert "2 Demo device(s), Demo 9000, for 2 rank(s)" in output
        assert "3 Demo device(s), Demo 9000, for 3 rank(s), but no GPU" in output
        # A host that is not probed detects its devices itself.
        shutil.rmtree(site / "chips" / "h01")
        unasked = ("experiment.runner.preflight=false", "experiment.runner.nproc_per_node=1")
        result = lab.run_action("test", *unasked)
        assert result.returncode == 0, result.stdout + result.stderr
        assert {"h00: ready: it's None", "h01: ready: None 1"} <= set(result.stdout.splitlines())


@pytest.mark.bed(hosts=2)
def test_host_without_the_package_is_reported(bed: Bed, tmp_path: Path, install: Install) -> None:
    """Its Python is probed, although its shell could count the devices."""
    site = install(h00=1, h01=1)
    fields = {"PYTHONPATH": str(site)}
    with ssh_lab(bed, tmp_path / "lab") as lab:
        lab.configure(
            light=False,
            task={"entrypoint": str(TRAIN_GPT)},
            envs={"node_specific": {"h00": fields}},
            top={"train": TINY},
        )
        result = lab.run_action("check", "train.system.device=demo")
        assert result.returncode == 2, result.stdout + result.stderr
        rows = [line for line in result.stdout.splitlines() if "communication" in line]
        assert [("ok" in row, "h00" in row) for row in rows] == [(True, True), (False, False)]
        assert "no kind of device is called 'demo'; known: auto, cpu, cuda" in result.stdout


def test_a_chip_from_outside_is_benchmarked(install: Install) -> None:
    install(**{socket.gethostname(): 2})
    argv = ["bench", "all_reduce", "-b", "1K", "-e", "1K", "-n", "2", "-c", "--device", "demo"]
    run = [sys.executable, "-m", "flagscale.cli", "comm", *argv]

    def bench(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*run, *more], capture_output=True, text=True, check=False)

    result = bench("-r", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "2 x Demo 9000" in result.stdout
    many = bench("-r", "3")
    assert many.returncode == 2
    assert "local rank 2 has no Demo device" in many.stderr
