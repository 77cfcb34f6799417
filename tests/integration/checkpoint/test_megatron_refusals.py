"""Megatron-LM checkpoints whose arguments and tensors disagree are refused, never loaded
wrongly.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.foreign_models import save
from torch.distributed import checkpoint as dcp

from flagscale.checkpoint_metadata import read_metadata
from flagscale.train.checkpoint.formats import convert
from flagscale.train.checkpoint.formats.base import detect_format
from flagscale.train.checkpoint.formats.lazy_tensors import read_tensor
from flagscale.train.checkpoint.formats.megatron_unpickler import load_pickle

pytestmark = [pytest.mark.torch, pytest.mark.integration]

FC1, FC2 = (f"decoder.layers.1.mlp.linear_fc{n}.weight" for n in (1, 2))
QKV = "decoder.layers.0.self_attention.linear_qkv"
NORM, HEAD = "decoder.final_layernorm.weight", "output_layer.weight"
KINDS = {
    "one": ["torch"],
    "tp2": ["torch", "--tensor-model-parallel-size", "2"],
    "pp2": ["torch", "--pipeline-model-parallel-size", "2"],
    "ep2": ["torch", "--expert-model-parallel-size", "2"],
    "dist": ["megatron_dist"],
}
State = dict[str, Any]
Change = Callable[[State], object]
"""Of what one rank holds, or of what all hold together: ``args`` and ``model``."""
Case = tuple[str, str, Change, list[str]]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Write Megatron-LM checkpoints on demand, by model and kind."""
    root = tmp_path_factory.mktemp("theirs")

    def made(name: str, kind: str) -> Path:
        path = root / f"{name}-{kind}"
        if not (root / name).exists():
            save(name, root / name)
        if not path.exists():
            assert convert.main([str(root / name), str(path), "--to", *KINDS[kind]]) == 0
        return path

    return made


def changed(source: Path, target: Path, change: Change, only: str = "mp_rank_*") -> Path:
    """Copy a checkpoint and apply ``change`` to the state of all ranks, or of those in ``only``."""
    shutil.copytree(source, target)
    for file in sorted(target.glob(f"release/{only}/model_optim_rng.pt")):
        state = load_pickle(file)
        state["model"] = {k: v.clone() if v is not None else v for k, v in state["model"].items()}
        change(state)
        file.unlink()
        torch.save(state, file)
    if (target / "release/common.pt").is_file():
        _change_distributed(target / "release", change)
    return target


def _change_distributed(path: Path, change: Change) -> None:
    state: State = load_pickle(path / "common.pt")
    metadata = read_metadata(path).state_dict_metadata
    model = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if hasattr(entry, "properties")
    }
    dcp.load(model, checkpoint_id=path, no_dist=True)
    state["model"] = model
    change(state)
    dcp.save(state.pop("model"), checkpoint_id=path, no_dist=True)
    torch.save(state, path / "common.pt")


def args(**namespace: Any) -> Change:
    return lambda state: vars(state["args"]).update(namespace)


def having(name: str, *shape: int) -> Change:
    return lambda state: state["model"].update({name: torch.ones(*shape)})


def cut(name: str, axis: int, by: int = 2) -> Change:
    def change(state: State) -> None:
        tensor = state["model"][name]
        state["model"][name] = tensor.narrow(axis, 0, tensor.shape[axis] - by).clone()

    return change


def without(name: str) -> Change:
    return lambda state: state["model"].pop(name)


def other(name: str) -> Change:
    return lambda state: state["model"][name].add_(1)


def refusal(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    out = tmp_path / "out"
    assert convert.main([str(path), str(out), "--to", "torch_dist"]) == 1
    assert not (out / "iter_0000000").exists()
    stderr = capsys.readouterr().err
    assert "Traceback" not in stderr
    return stderr


UNTOLD: dict[str, Case] = {
    "a bias": ("llama", "one", having(f"{QKV}.bias", 64), [f"{QKV}.bias (in mp_rank_00)"]),
    "an unknown one": (
        "llama",
        "tp2",
        having("decoder.layers.0.mystery.weight", 3),
        ["do not announce", "decoder.layers.0.mystery.weight (in mp_rank_00)", "num_layers"],
    ),
    "of the last stage": (
        "llama",
        "pp2",
        having("decoder.layers.0.mystery.weight", 3),
        ["mystery.weight (in mp_rank_00_000)", "mystery.weight (in mp_rank_00_001)"],
    ),
    "of another expert rank": ("mixtral", "ep2", having("odd", 3), ["odd (in mp_rank_00_000)"]),
    "another spelling": (
        "llama",
        "one",
        having("decoder.layers.0.input_layernorm.weight", 32),
        ["decoder.layers.0.input_layernorm.weight"],
    ),
    "layers": ("llama", "one", args(num_layers=1), [f"{FC2} (in mp_rank_00)"]),
    "layers of stages": ("llama", "pp2", args(num_layers=1), ["(in mp_rank_00_001)"]),
    "an output layer": (
        "llama",
        "one",
        args(untie_embeddings_and_output_weights=False),
        [f"{HEAD} is there and is not the embedding"],
    ),
    "an output layer, distributed": (
        "llama",
        "dist",
        args(untie_embeddings_and_output_weights=False),
        [f"{HEAD} is there and is not the embedding"],
    ),
    "stacked biases": (
        "llama",
        "dist",
        having("decoder.layers.self_attention.linear_qkv.bias", 2, 64),
        ["do not announce", "decoder.layers.self_attention.linear_qkv.bias"],
    ),
    "stacked layers": (
        "llama",
        "dist",
        args(num_layers=1),
        ["decoder.layers.mlp.linear_fc2.weight: expected shape [1, 32, 48], found [2, 32, 48]"],
    ),
    "further layers": ("llama", "one", having("mtp.layers.0.enorm.weight", 32), ["mtp.layers.0"]),
}


@pytest.mark.parametrize("case", UNTOLD)
def test_unexpected_tensors_are_named(
    theirs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    name, kind, change, words = UNTOLD[case]
    stderr = refusal(changed(theirs(name, kind), tmp_path / "in", change), tmp_path, capsys)
    assert [word for word in words if word not in stderr] == [], stderr


MISSHAPEN: dict[str, Case] = {
    "columns": ("llama", "one", cut(FC2, 1), ["expected shape [32, 48], found [32, 46]"]),
    "rows on all ranks": ("llama", "tp2", cut(FC1, 0), ["expected shape [48, 32], found [46, 32]"]),
    "width": ("llama", "one", args(hidden_size=64), [f"{NORM} (mp_rank_00): expected shape [64]"]),
    "inner width": ("llama", "one", args(ffn_hidden_size=24), [FC2, "expected shape [32, 24]"]),
    "groups": ("llama", "one", args(num_query_groups=4), [f"{QKV}.weight", "expected shape [96, "]),
    "no groups": ("llama", "one", args(num_query_groups=None), ["expected shape [96, 32]"]),
    "vocabulary": ("llama", "one", args(vocab_size=10**10), ["10000000000, 32], found [130, 32]"]),
    "fewer tokens": ("llama", "one", args(vocab_size=100), ["shape [100, 32], found [130, 32]"]),
    "half of the ranks": (
        "llama",
        "tp2",
        args(tensor_model_parallel_size=1),
        [f"{QKV}.weight (mp_rank_00): expected shape [64, 32], found [32, 32]"],
    ),
    "width, distributed": ("llama", "dist", args(hidden_size=64), ["expected shape [2, 64, 48]"]),
    "columns, distributed": (
        "llama",
        "dist",
        cut("decoder.layers.mlp.linear_fc2.weight", 2),
        ["decoder.layers.mlp.linear_fc2.weight: expected shape [2, 32, 48], found [2, 32, 46]"],
    ),
    "fewer tokens, distributed": ("llama", "dist", args(vocab_size=100), ["found [130, 32]"]),
    "precision": (
        "llama",
        "tp2",
        lambda state: state["model"].update({FC1: state["model"][FC1].to(torch.int32)}),
        [f"{FC1} (mp_rank_00): expected weights of 16 bits or more, found int32"],
    ),
    "experts": ("mixtral", "one", args(num_experts=3), ["expected shape [3, 32], found [4, 32]"]),
    "an expert": (
        "mixtral",
        "one",
        cut("decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight", 0),
        ["experts.linear_fc1.weight (mp_rank_00): expected shape [96, 32], found [94, 32]"],
    ),
}


@pytest.mark.parametrize("case", MISSHAPEN)
@pytest.mark.parametrize("to", ["torch_dist", "huggingface"])
def test_tensors_of_unexpected_shapes_are_named(
    theirs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str, to: str
) -> None:
    name, kind, change, words = MISSHAPEN[case]
    path = changed(theirs(name, kind), tmp_path / "in", change)
    assert convert.main([str(path), str(tmp_path / "out"), "--to", to]) == 1
    stderr = capsys.readouterr().err
    words = ["has tensors that do not fit its arguments", *words]
    assert [word for word in words if word not in stderr] == [], stderr


ONE_RANK: dict[str, Case] = {
    "rows of one": ("llama", "tp2", cut(FC1, 0), [f"{FC1} (mp_rank_01): expected shape [48, 32]"]),
    "columns of one": ("llama", "tp2", cut(FC2, 1), [f"{FC2} (mp_rank_01): expected shape [32, "]),
    "a norm": ("llama", "tp2", other(NORM), [f"{NORM}: the copies of it that ranks have differ"]),
    "a rank's precision": (
        "llama",
        "tp2",
        lambda state: state["model"].update({FC1: state["model"][FC1].half()}),
        [f"{FC1} (mp_rank_01): one precision expected, found float16 and float32"],
    ),
    "what ranks of experts share": (
        "mixtral",
        "ep2",
        other(f"{QKV}.weight"),
        [f"{QKV}.weight: the copies of it that ranks have differ"],
    ),
    "a tied output layer": (
        "llama-tied",
        "pp2",
        other(HEAD),
        [f"{HEAD} is there and is not the embedding"],
    ),
    "lost": ("llama", "tp2", without(FC1), ["lacks tensors", FC1]),
    "a rank of another model": (
        "llama",
        "tp2",
        args(norm_epsilon=0.5, rotary_base=7),
        [
            "mp_rank_01/model_optim_rng.pt",
            "of another model: norm_epsilon: 0.5, and ",
            "rotary_base: 7, and ",
        ],
    ),
}


@pytest.mark.parametrize("case", ONE_RANK)
def test_a_rank_that_does_not_fit_the_others_is_named(
    theirs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    name, kind, change, words = ONE_RANK[case]
    last = {"tp2": "mp_rank_01", "ep2": "mp_rank_00_001", "pp2": "mp_rank_00_001"}[kind]
    path = changed(theirs(name, kind), tmp_path / "in", change, last)
    stderr = refusal(path, tmp_path, capsys)
    assert [word for word in words if word not in stderr] == [], stderr


STATES = {
    f"{QKV}._extra_state": torch.zeros(5, dtype=torch.uint8),
    "decoder.layers.0.self_attention.core_attention._extra_state": None,
    "rotary_pos_emb.inv_freq": torch.ones(4),
    "decoder.layers.1.mlp.router.local_tokens_per_expert": torch.ones(4),
}
DISTRIBUTED_STATES = {
    "optimizer.state.exp_avg.decoder.final_layernorm.weight": torch.zeros(32),
    "chained_1.optimizer.distributed.dp_group_idx_0.param": torch.zeros(7),
    "rng_state/shard_0.0_1.1": torch.zeros(7, dtype=torch.uint8),
}


def _with_states(state: State) -> None:
    distributed = not any(name.startswith("decoder.layers.0.") for name in state["model"])
    more = {**STATES, **(DISTRIBUTED_STATES if distributed else {})}
    state_names = {
        name: tensor for name, tensor in more.items() if tensor is not None or not distributed
    }
    state["model"].update(state_names)
    state |= {"optimizer": {"step": 3}, "opt_param_scheduler": {"lr": 1.0}, "rng_state": [1]}


ACCEPTED: dict[str, tuple[str, str, Change]] = {
    "states": ("llama", "one", _with_states),
    "states, distributed": ("llama", "dist", _with_states),
    "a tied output layer": (
        "llama-tied",
        "one",
        lambda state: state["model"].update(
            {HEAD: state["model"]["embedding.word_embeddings.weight"]}
        ),
    ),
    "further layers": (
        "llama",
        "one",
        lambda state: (
            args(mtp_num_layers=1)(state),
            having("mtp.layers.0.enorm.weight", 32)(state),
        ),
    ),
    "padding": (
        "llama",
        "one",
        lambda state: (
            args(make_vocab_size_divisible_by=128)(state),
            state["model"].update(
                {
                    name: torch.cat([state["model"][name], torch.zeros(126, 32)])
                    for name in ("embedding.word_embeddings.weight", HEAD)
                }
            ),
        ),
    ),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_training_state_is_ignored(theirs: Any, tmp_path: Path, case: str) -> None:
    name, kind, change = ACCEPTED[case]
    path = changed(theirs(name, kind), tmp_path / "in", change)
    actual, expected = (
        detect_format(name_).read(name_).tensors for name_ in (path, theirs(name, kind))
    )
    assert actual.keys() == expected.keys()
    assert all(
        read_tensor(tensor).equal(read_tensor(expected[key])) for key, tensor in actual.items()
    )


ODD: dict[str, tuple[Any, str]] = {
    "num_layers": (None, "num_layers: expected a whole number from 1, it is missing"),
    "num_layers, a text": ("2", "num_layers: expected a whole number from 1 to 65,536, found '2'"),
    "num_layers, many": (10**9, "num_layers: expected a whole number from 1 to 65,536, found 1000"),
    "num_experts": (10**5, "num_moe_experts: expected a whole number from 1 to 65,536"),
    "hidden_size": (-32, "hidden_size: expected a whole number from 1, found -32"),
    "rotary_base": ("abc", "rotary_base: expected a whole number from 1, found 'abc'"),
    "swiglu": ("yes", "swiglu: expected true or false, found 'yes'"),
    "normalization": (3, "normalization: expected a text, found 3"),
    "layernorm_epsilon": (float("nan"), "layernorm_epsilon: expected a number from 0, found nan"),
    "num_query_groups": (3, "num_query_groups: expected a divisor of 4 heads, found 3"),
    "num_query_groups, none": (0, "num_query_groups: expected a whole number from 1 to 65,536"),
    "window_size": ([1], "window_size: expected two whole numbers, found [1]"),
    "no_rope_freq": ([1], "no_rope_freq: expected an item for each of 2 layers, has 1"),
    "vocab_size": ("x", "vocab_size: expected a whole number from 1 to"),
    "tensor_model_parallel_size": (-2, "tensor_model_parallel_size: expected a whole number from"),
    "tensor_model_parallel_size, a text": ("x", "tensor_model_parallel_size: expected a whole"),
    "make_vocab_size_divisible_by": (0, "make_vocab_size_divisible_by: expected a whole number"),
}


@pytest.mark.parametrize("kind", ["one", "dist"])
@pytest.mark.parametrize("case", ODD)
def test_odd_arguments_are_named(
    theirs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str, kind: str
) -> None:
    value, message = ODD[case]
    change = args(**{case.partition(",")[0]: value})
    path = changed(theirs("llama", kind), tmp_path / "in", change)
    assert message in refusal(path, tmp_path, capsys)


FILES = {
    "empty": (b"", "model_optim_rng.pt is empty"),
    "cut": (b"PK\x03\x04 and no end", "model_optim_rng.pt is cut"),
    "old": (b"\x80\x02}q\x00.", "model_optim_rng.pt is no checkpoint that torch can map"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_torch_cannot_map_is_named(
    theirs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    content, message = FILES[case]
    shutil.copytree(theirs("llama", "one"), tmp_path / "in")
    (tmp_path / "in/release/mp_rank_00/model_optim_rng.pt").write_bytes(content)
    assert message in refusal(tmp_path / "in", tmp_path, capsys)


def test_help_lists_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        convert.main(["--help"])
    assert "megatron_dist" in capsys.readouterr().out
