"""Tests of the options of backends, from the configuration to environment variables."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.arguments import train_arguments, values_by_yaml_name

from flagscale.comm import options, registry
from flagscale.comm.base import OPERATIONS
from flagscale.comm.options import Option
from flagscale.errors import ConfigError


@pytest.mark.parametrize(
    ("backend", "arguments", "expected"),
    [
        ("gloo", ["socket_ifname=eth0"], {"socket_ifname": "eth0"}),
        ("fsccl", ["clusters=4,4", "pipeline_k=2"], {"clusters": "4,4", "pipeline_k": 2}),
        ("fsccl", ["algo=ring"], {"algo": "ring"}),
        ("gloo", ["socket_ifname=a=b"], {"socket_ifname": "a=b"}),
        ("nccl", ["max_ctas=16", "split_share=TRUE"], {"max_ctas": 16, "split_share": True}),
        ("ucc", ["tls=ucp", "ucx_tls=rc"], {"tls": "ucp", "ucx_tls": "rc"}),
        (
            "auto",
            ["socket_ifname=eth0", "net_name=IB"],
            {"socket_ifname": "eth0", "net_name": "IB"},
        ),
        ("cpu:gloo,cuda:nccl", ["min_ctas=2"], {"min_ctas": 2}),
        ("mpi", [], {}),
    ],
)
def test_options_are_parsed(
    backend: str, arguments: list[str], expected: dict[str, object]
) -> None:
    assert registry.parse_backend_options(backend, arguments) == expected


@pytest.mark.parametrize(
    ("backend", "arguments", "message"),
    [
        ("gloo", ["socket_ifnam=x"], "no option of gloo; did you mean 'socket_ifname'"),
        ("mpi", ["x=1"], "x: is no option of mpi \\(it has none\\)"),
        ("nccl", ["max_ctas"], "max_ctas: has no value; expected a whole number from 1 to 64"),
        ("nccl", ["max_ctas=0"], "max_ctas: expected a whole number from 1 to 64, found '0'"),
        ("nccl", ["max_ctas=two"], "found 'two'"),
        ("nccl", ["split_share=1"], "split_share: expected true or false, found '1'"),
        ("fsccl", ["clusters=4,x"], "clusters: expected comma-separated sizes, such as"),
        ("fsccl", ["clusters=0,4"], "found '0,4'"),
        ("fsccl", ["pipeline_k=99"], "a whole number from 0 to 64, found '99'"),
        ("fsccl", ["algo=rings"], "algo: expected auto, ring, tree or transpose, found 'rings'"),
        ("fsccl", ["debug=yes"], "expected INFO or WARN, found 'yes'"),
        ("gloo", ["socket_ifname="], "socket_ifname: expected a text, found ''"),
        ("gloo", ["socket_ifname=a", "socket_ifname=b"], "is given twice"),
        # Only torch can take this option, and it takes one set of options for a whole map.
        ("cpu:gloo,cuda:nccl", ["split_share=true"], "no option of cpu:gloo,cuda:nccl"),
        ("torchcomms", ["torch_distributed_use_torchcomms=1"], "it has none"),
    ],
)
def test_invalid_options_are_reported(backend: str, arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        registry.parse_backend_options(backend, arguments)


def test_all_problems_are_in_one_error() -> None:
    with pytest.raises(ConfigError) as error:
        registry.parse_backend_options("nccl", ["a=1", "b=2", "max_ctas=x"])
    assert [problem.key for problem in error.value.problems] == ["a", "b", "max_ctas"]


def test_options_become_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_MAX_CTAS", "NCCL_NET", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "before")
    registry.get_backend("nccl").export_options({"max_ctas": 8, "split_share": True})
    assert (os.environ["NCCL_MAX_CTAS"], os.environ["NCCL_NET"]) == ("8", "before")
    registry.get_backend("cpu:gloo,cuda:nccl").export_options({"socket_ifname": "e é"})
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == "e é"


def test_booleans_become_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("X", "before")
    options.export_variables([Option("x", "a switch", "bool", variable="X")], {"x": False})
    assert os.environ["X"] == "0"


@pytest.mark.parametrize("name", registry.list_backend_names())
def test_supported_operations(name: str) -> None:
    adapter = registry.get_backend(name)
    assert set(adapter.operations) <= set(OPERATIONS)
    assert "all_reduce" in adapter.operations
    assert len({o.name for o in adapter.options}) == len(adapter.options)


def test_map_supports_the_common_operations() -> None:
    assert "reduce_scatter" not in registry.get_backend("cpu:mpi,cuda:nccl").operations
    assert registry.get_backend("cpu:gloo,cuda:nccl").operations == OPERATIONS


def test_benchmark_measures_the_operations_of_the_adapters() -> None:
    from flagscale.bench.collectives.operations import OPERATIONS as MEASURED_OPERATIONS

    assert set(MEASURED_OPERATIONS) == set(OPERATIONS)


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"a": 1}, {"a": 1}),
        ({"comm": {"x": True, "y": None, "z": 1.5}}, {"comm": ["x=true", "z=1.5"]}),
        ({"comm": {}}, {"comm": None}),
        ({"comm": ["x=1"]}, {"comm": ["x=1"]}),
        ({"comm": {"x": {"y": 1}}}, {"y": 1}),
    ],
    ids=["none", "values", "empty", "list", "nested"],
)
def test_option_map_becomes_name_value_pairs(
    section: dict[str, object], expected: dict[str, object]
) -> None:
    assert values_by_yaml_name(train_arguments(system=section)) == expected


_YAML = """\
experiment:
  exp_name: x
  exp_dir: {directory}
  task: {{type: train, backend: megatron}}
train:
  system:
    distributed_backend: gloo
    comm:
      socket_ifname: lo
      socket_ifnam: lo
  model: {{num_layers: 2, hidden_size: 8, num_attention_heads: 2, seq_length: 8, train_iters: 1,
           micro_batch_size: 1, global_batch_size: 1, lr: 0.1}}
  data: {{mock_data: true, tokenizer_type: NullTokenizer, vocab_size: 8}}
node_specific:
  a: {{system: {{comm: {{socket_ifname: eth1}}}}}}
  b: {{comm: {{socket_ifname: eth2}}}}
"""


def test_options_are_checked_before_the_launch(tmp_path: Path) -> None:
    from flagscale.config.load import load
    from flagscale.launcher.planning.support import check_backend

    (tmp_path / "x.yaml").write_text(_YAML.format(directory=tmp_path))
    experiment = load(tmp_path, "x", []).experiment
    assert experiment.train["comm"] == ["socket_ifname=lo", "socket_ifnam=lo"]
    host_arguments = {
        argument.key: argument.value
        for host in experiment.by_host.values()
        for argument in host.arguments
    }
    assert host_arguments == {
        "node_specific.a.system.comm": ["socket_ifname=eth1"],
        "node_specific.b.comm": ["socket_ifname=eth2"],
    }
    (problem,) = check_backend(experiment)
    assert problem.key == "train.system.comm"
    assert str(problem.where).endswith("x.yaml:8")
    assert "socket_ifnam: is no option of gloo; did you mean 'socket_ifname'?" in problem.message


def test_options_can_be_overridden_without_quotes() -> None:
    from flagscale.config.overrides import normalize_overrides

    overrides = ["train.system.comm.clusters=4,4", "train.system.comm.debug=INFO", "train.comm.x=1"]
    assert normalize_overrides(overrides) == [
        "++train.system.comm.clusters='4,4'",
        "++train.system.comm.debug='INFO'",
        "train.comm.x=1",
    ]
