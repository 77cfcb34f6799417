"""Tests of the backend check in preflights and of the interpretation of its result."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.arguments import train_arguments

from flagscale.config import load as loading
from flagscale.config.interpolation import host_reference, split_references
from flagscale.config.schema import PROJECT, Experiment
from flagscale.hosts import probe
from flagscale.hosts.facts import ModuleQuery
from flagscale.hosts.hostfile import Host
from flagscale.launcher.planning.per_host import resolve_settings
from flagscale.launcher.planning.support import check_backend
from flagscale.launcher.preflight import backend
from flagscale.launcher.preflight.host_probe import HostReplies, build_queries

_YAML = """\
experiment:
  exp_name: x
  exp_dir: {directory}
  task: {{type: train, backend: megatron{entrypoint}}}
  envs: {{A_TOKEN: secret, X: "1", node_specific: {{h1: {{X: "2", PYTHONPATH: "{directory}"}}}}}}
train:
  system:
    distributed_backend: {name}
  model: {{num_layers: 2, hidden_size: 8, num_attention_heads: 2, seq_length: 8, train_iters: 1,
           micro_batch_size: 1, global_batch_size: 1, lr: 0.1}}
  data: {{mock_data: true, tokenizer_type: NullTokenizer, vocab_size: 8}}
device_type_specific:
  fast: {{comm: {{socket_ifnam: eth0}}}}
node_specific:
  h0: {{system: {{comm: {{socket_ifname: eth1}}}}}}
  h1: {{system: {{comm: {{clusters: "4,4"}}}}}}
"""
Load = Callable[..., Experiment]
THIS_HOST = Host("h1")


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def load_experiment(name: str, entrypoint: str = "") -> Experiment:
        entrypoint_setting = f", entrypoint: {entrypoint}" if entrypoint else ""
        text = _YAML.format(directory=tmp_path, name=name, entrypoint=entrypoint_setting)
        (tmp_path / "x.yaml").write_text(text)
        return loading.load(tmp_path, "x", []).experiment

    return load_experiment


def test_options_of_single_hosts_are_checked_with_the_plan(load: Load) -> None:
    problems = {p.key: (p.message, str(p.where)) for p in check_backend(load("gloo"))}
    assert list(problems) == ["device_type_specific.fast.comm", "node_specific.h1.system.comm"]
    message, where = problems["device_type_specific.fast.comm"]
    assert "socket_ifnam: is no option of gloo; did you mean 'socket_ifname'?" in message
    assert where.endswith("x.yaml:13")


def test_only_adapter_options_may_differ_between_hosts(load: Load) -> None:
    """Options that choose an algorithm must be the same on every host.

    A host that has options of its own must not lose such an option of the job either.
    """
    experiment = load("fsccl")
    problems = {p.key: p.message for p in check_backend(experiment)}
    assert problems.keys() == {"device_type_specific.fast.comm", "node_specific.h1.system.comm"}
    assert problems["node_specific.h1.system.comm"].startswith(
        "clusters: has to be the same on every"
    )
    train = experiment.train.with_added(train_arguments(system={"comm": ["clusters=4,4"]}).entries)
    problem_keys = {p.key for p in check_backend(replace(experiment, train=train, by_type={}))}
    assert problem_keys == {"node_specific.h0.system.comm"}


def test_examples_are_checked_and_external_programs_are_not(load: Load, tmp_path: Path) -> None:
    external = tmp_path / "pretrain.py"
    external.write_text("")
    assert check_backend(load("hccl", str(external))) == []
    (problem,) = check_backend(load("hccl", str(PROJECT / "examples/comm/torch_api.py")))
    assert (problem.key, "'hccl' is not a known" in problem.message) == (
        "train.system.distributed_backend",
        True,
    )


def test_examples_get_their_options_as_one_argument(load: Load) -> None:
    program = str(PROJECT / "examples/comm/torch_api.py")
    (argument,) = load("gloo", program).by_host["h0"].arguments
    key = "node_specific.h0.system.comm"
    assert (argument.key, argument.value) == (key, ["socket_ifname=eth1"])


def queries_for(experiment: Experiment) -> Sequence[ModuleQuery]:
    """Return the module queries of a preflight on this machine."""
    replies = HostReplies(
        (THIS_HOST,),
        (resolve_settings(experiment, THIS_HOST),),
        is_local=True,
        required_paths=({},),
    )
    (query,) = build_queries(experiment, replies, for_preflight=True, ignore_cache=False)
    assert query.preflight is not None
    return query.preflight.module_queries


def test_module_queries(load: Load) -> None:
    experiment = load("flagcx")
    (query,) = queries_for(experiment)
    assert (query.name, query.module) == ("communication", "flagscale.comm.check")
    assert query.words == ["flagcx", "auto"]
    # Secrets are not sent to the host; variables of this host take precedence.
    assert set(query.environment) == {"X", "PYTHONPATH"}
    assert query.environment["X"] == ["2"]
    for name in ("auto", "nccl", "gloo"):
        assert queries_for(load(name)) == []


@pytest.mark.parametrize(
    ("name", "gpus", "answer", "ok", "message"),
    [
        ("fsccl", 0, {"device": "cpu", "version": "0.1.0"}, True, "fsccl 0.1.0"),
        ("fsccl", 0, None, True, "fsccl, not asked for"),
        ("gloo", 0, None, True, "gloo, which comes with torch"),
        ("gloo", 2, None, False, "gloo cannot do sendrecv, permute on GPU memory"),
        ("mpi", 0, {"problem": "no MPI", "hint": "build it"}, False, "no MPI"),
    ],
)
def test_check_results(
    load: Load, name: str, gpus: int, answer: dict[str, Any] | None, ok: bool, message: str
) -> None:
    check = backend.check_backend(load(name), THIS_HOST, answer, {"cuda": gpus})
    assert (check.ok, message in check.found) == (ok, True)
    if not ok:
        assert "x.yaml:8: train.system.distributed_backend: " in check.found
        assert check.hint


@pytest.mark.torch
def test_check_uses_the_hosts_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fastlib.py").write_text(
        "from flagscale.comm.base import CommBackend\n"
        "class Fast(CommBackend):\n"
        "    name, summary, devices = '?', 'a fast backend', ('cpu', 'cuda')\n"
        "    def explain_unavailable(self, device): return None\n"
        "    def version(self): return '7.1'\n"
    )
    info = tmp_path / "fastlib-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fastlib\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[flagscale.comm_backends]\nfast = fastlib:Fast\n")
    environment = {
        "PYTHONPATH": split_references("PYTHONPATH", f"/nowhere:{host_reference('FAST_PLACE')}")
    }
    monkeypatch.setenv("FAST_PLACE", str(tmp_path))
    query = {
        "module": backend.MODULE,
        "words": ["fast", "cpu"],
        "project": str(PROJECT),
        "environment": environment,
    }
    assert probe.run_module(query, [sys.executable]) == {"device": "cpu", "version": "7.1"}
    query["environment"] = {}
    answer = probe.run_module(query, [sys.executable])
    assert answer["problem"].startswith("'fast' is not a known backend")


def test_failure_of_python_is_reported() -> None:
    query = {"module": "x", "words": ["mpi"], "project": "/nowhere", "environment": {}}
    program = "import sys; print('one', file=sys.stderr); sys.exit('last words')"
    assert probe.run_module(query, [sys.executable, "-c", program]) == {"problem": "last words"}
    answer = probe.run_module(query, [sys.executable, "-c", f"print('''{json.dumps({'a': 1})}''')"])
    assert answer == {"a": 1}
