"""Refusal of Megatron-LM checkpoints whose arguments and tensors disagree."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.foreign_models import save_model
from torch.distributed import checkpoint as dcp

from flagscale.checkpoint_metadata import read_metadata
from flagscale.train.checkpoint.formats import convert
from flagscale.train.checkpoint.formats.base import detect_format
from flagscale.train.checkpoint.formats.lazy_tensors import read_tensor
from flagscale.train.checkpoint.formats.megatron_unpickler import load_pickle

pytestmark = [pytest.mark.torch, pytest.mark.integration]

FC1, FC2 = (f"decoder.layers.1.mlp.linear_fc{n}.weight" for n in (1, 2))
QKV = "decoder.layers.0.self_attention.linear_qkv"
NORM, OUTPUT_LAYER = "decoder.final_layernorm.weight", "output_layer.weight"
LAYOUT_OPTIONS = {
    "one": ["torch"],
    "tp2": ["torch", "--tensor-model-parallel-size", "2"],
    "pp2": ["torch", "--pipeline-model-parallel-size", "2"],
    "ep2": ["torch", "--expert-model-parallel-size", "2"],
    "dist": ["megatron_dist"],
}
State = dict[str, Any]
StateChange = Callable[[State], object]
"""Function that changes the content of a rank's file, or of a distributed checkpoint, in place.

The content has the keys ``args`` and ``model``.
"""
Case = tuple[str, str, StateChange, list[str]]
"""Model, layout (a key of LAYOUT_OPTIONS), change, and texts that the error must contain."""


@pytest.fixture(scope="module")
def write_on_demand(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Write Megatron-LM checkpoints on demand, by model and kind."""
    root = tmp_path_factory.mktemp("theirs")

    def write_checkpoint(name: str, layout: str) -> Path:
        path = root / f"{name}-{layout}"
        if not (root / name).exists():
            save_model(name, root / name)
        if not path.exists():
            assert convert.main([str(root / name), str(path), "--to", *LAYOUT_OPTIONS[layout]]) == 0
        return path

    return write_checkpoint


def copy_changed(
    source: Path, target: Path, change: StateChange, rank_pattern: str = "mp_rank_*"
) -> Path:
    """Copy a checkpoint and apply a change to the state of the ranks that match a pattern."""
    shutil.copytree(source, target)
    for file in sorted(target.glob(f"release/{rank_pattern}/model_optim_rng.pt")):
        state = load_pickle(file)
        state["model"] = {k: v.clone() if v is not None else v for k, v in state["model"].items()}
        change(state)
        file.unlink()
        torch.save(state, file)
    if (target / "release/common.pt").is_file():
        _change_distributed(target / "release", change)
    return target


def _change_distributed(path: Path, change: StateChange) -> None:
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


def set_arguments(**namespace: Any) -> StateChange:
    """Return a change of arguments that the checkpoint records."""
    return lambda state: vars(state["args"]).update(namespace)


def add_tensor(name: str, *shape: int) -> StateChange:
    """Return a change that adds a tensor of ones, or replaces one."""
    return lambda state: state["model"].update({name: torch.ones(*shape)})


def trim_tensor(name: str, axis: int, removed_count: int = 2) -> StateChange:
    """Return a change that removes the last rows or columns of a tensor."""

    def change(state: State) -> None:
        tensor = state["model"][name]
        state["model"][name] = tensor.narrow(axis, 0, tensor.shape[axis] - removed_count).clone()

    return change


def remove_tensor(name: str) -> StateChange:
    """Return a change that deletes a tensor."""
    return lambda state: state["model"].pop(name)


def alter_tensor(name: str) -> StateChange:
    """Return a change of the values of a tensor."""
    return lambda state: state["model"][name].add_(1)


def convert_with_error(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Convert a checkpoint, which must fail and write nothing; return the error output."""
    out = tmp_path / "out"
    assert convert.main([str(path), str(out), "--to", "torch_dist"]) == 1
    assert not (out / "iter_0000000").exists()
    stderr = capsys.readouterr().err
    assert "Traceback" not in stderr
    return stderr


UNEXPECTED_TENSORS: dict[str, Case] = {
    "a bias": ("llama", "one", add_tensor(f"{QKV}.bias", 64), [f"{QKV}.bias (in mp_rank_00)"]),
    "an unknown one": (
        "llama",
        "tp2",
        add_tensor("decoder.layers.0.mystery.weight", 3),
        ["do not imply", "decoder.layers.0.mystery.weight (in mp_rank_00)", "num_layers"],
    ),
    "of the last stage": (
        "llama",
        "pp2",
        add_tensor("decoder.layers.0.mystery.weight", 3),
        ["mystery.weight (in mp_rank_00_000)", "mystery.weight (in mp_rank_00_001)"],
    ),
    "of another expert rank": ("mixtral", "ep2", add_tensor("odd", 3), ["odd (in mp_rank_00_000)"]),
    "another spelling": (
        "llama",
        "one",
        add_tensor("decoder.layers.0.input_layernorm.weight", 32),
        ["decoder.layers.0.input_layernorm.weight"],
    ),
    "layers": ("llama", "one", set_arguments(num_layers=1), [f"{FC2} (in mp_rank_00)"]),
    "layers of stages": ("llama", "pp2", set_arguments(num_layers=1), ["(in mp_rank_00_001)"]),
    "an output layer": (
        "llama",
        "one",
        set_arguments(untie_embeddings_and_output_weights=False),
        [f"{OUTPUT_LAYER} is there and is not the embedding"],
    ),
    "an output layer, distributed": (
        "llama",
        "dist",
        set_arguments(untie_embeddings_and_output_weights=False),
        [f"{OUTPUT_LAYER} is there and is not the embedding"],
    ),
    "stacked biases": (
        "llama",
        "dist",
        add_tensor("decoder.layers.self_attention.linear_qkv.bias", 2, 64),
        ["do not imply", "decoder.layers.self_attention.linear_qkv.bias"],
    ),
    "stacked layers": (
        "llama",
        "dist",
        set_arguments(num_layers=1),
        ["decoder.layers.mlp.linear_fc2.weight: expected shape [1, 32, 48], found [2, 32, 48]"],
    ),
    "further layers": (
        "llama",
        "one",
        add_tensor("mtp.layers.0.enorm.weight", 32),
        ["mtp.layers.0"],
    ),
}


@pytest.mark.parametrize("case", UNEXPECTED_TENSORS)
def test_unexpected_tensors_are_named(
    write_on_demand: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    name, layout, change, expected_texts = UNEXPECTED_TENSORS[case]
    stderr = convert_with_error(
        copy_changed(write_on_demand(name, layout), tmp_path / "in", change), tmp_path, capsys
    )
    assert [text for text in expected_texts if text not in stderr] == [], stderr


WRONG_SHAPES: dict[str, Case] = {
    "columns": ("llama", "one", trim_tensor(FC2, 1), ["expected shape [32, 48], found [32, 46]"]),
    "rows on all ranks": (
        "llama",
        "tp2",
        trim_tensor(FC1, 0),
        ["expected shape [48, 32], found [46, 32]"],
    ),
    "width": (
        "llama",
        "one",
        set_arguments(hidden_size=64),
        [f"{NORM} (mp_rank_00): expected shape [64]"],
    ),
    "inner width": (
        "llama",
        "one",
        set_arguments(ffn_hidden_size=24),
        [FC2, "expected shape [32, 24]"],
    ),
    "groups": (
        "llama",
        "one",
        set_arguments(num_query_groups=4),
        [f"{QKV}.weight", "expected shape [96, "],
    ),
    "no groups": (
        "llama",
        "one",
        set_arguments(num_query_groups=None),
        ["expected shape [96, 32]"],
    ),
    "vocabulary": (
        "llama",
        "one",
        set_arguments(vocab_size=10**10),
        ["10000000000, 32], found [130, 32]"],
    ),
    "fewer tokens": (
        "llama",
        "one",
        set_arguments(vocab_size=100),
        ["shape [100, 32], found [130, 32]"],
    ),
    "half of the ranks": (
        "llama",
        "tp2",
        set_arguments(tensor_model_parallel_size=1),
        [f"{QKV}.weight (mp_rank_00): expected shape [64, 32], found [32, 32]"],
    ),
    "width, distributed": (
        "llama",
        "dist",
        set_arguments(hidden_size=64),
        ["expected shape [2, 64, 48]"],
    ),
    "columns, distributed": (
        "llama",
        "dist",
        trim_tensor("decoder.layers.mlp.linear_fc2.weight", 2),
        ["decoder.layers.mlp.linear_fc2.weight: expected shape [2, 32, 48], found [2, 32, 46]"],
    ),
    "fewer tokens, distributed": (
        "llama",
        "dist",
        set_arguments(vocab_size=100),
        ["found [130, 32]"],
    ),
    "precision": (
        "llama",
        "tp2",
        lambda state: state["model"].update({FC1: state["model"][FC1].to(torch.int32)}),
        [f"{FC1} (mp_rank_00): expected weights of 16 bits or more, found int32"],
    ),
    "experts": (
        "mixtral",
        "one",
        set_arguments(num_experts=3),
        ["expected shape [3, 32], found [4, 32]"],
    ),
    "an expert": (
        "mixtral",
        "one",
        trim_tensor("decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight", 0),
        ["experts.linear_fc1.weight (mp_rank_00): expected shape [96, 32], found [94, 32]"],
    ),
}


@pytest.mark.parametrize("case", WRONG_SHAPES)
@pytest.mark.parametrize("output_format", ["torch_dist", "huggingface"])
def test_tensors_of_unexpected_shapes_are_named(
    write_on_demand: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    case: str,
    output_format: str,
) -> None:
    name, layout, change, expected_texts = WRONG_SHAPES[case]
    path = copy_changed(write_on_demand(name, layout), tmp_path / "in", change)
    assert convert.main([str(path), str(tmp_path / "out"), "--to", output_format]) == 1
    stderr = capsys.readouterr().err
    expected_texts = ["has tensors that do not fit its arguments", *expected_texts]
    assert [text for text in expected_texts if text not in stderr] == [], stderr


ONE_RANK_CHANGES: dict[str, Case] = {
    "rows of one": (
        "llama",
        "tp2",
        trim_tensor(FC1, 0),
        [f"{FC1} (mp_rank_01): expected shape [48, 32]"],
    ),
    "columns of one": (
        "llama",
        "tp2",
        trim_tensor(FC2, 1),
        [f"{FC2} (mp_rank_01): expected shape [32, "],
    ),
    "a norm": (
        "llama",
        "tp2",
        alter_tensor(NORM),
        [f"{NORM}: the copies of it that ranks have differ"],
    ),
    "a rank's precision": (
        "llama",
        "tp2",
        lambda state: state["model"].update({FC1: state["model"][FC1].half()}),
        [f"{FC1} (mp_rank_01): one precision expected, found float16 and float32"],
    ),
    "what ranks of experts share": (
        "mixtral",
        "ep2",
        alter_tensor(f"{QKV}.weight"),
        [f"{QKV}.weight: the copies of it that ranks have differ"],
    ),
    "a tied output layer": (
        "llama-tied",
        "pp2",
        alter_tensor(OUTPUT_LAYER),
        [f"{OUTPUT_LAYER} is there and is not the embedding"],
    ),
    "lost": ("llama", "tp2", remove_tensor(FC1), ["lacks tensors", FC1]),
    "a rank of another model": (
        "llama",
        "tp2",
        set_arguments(norm_epsilon=0.5, rotary_base=7),
        [
            "mp_rank_01/model_optim_rng.pt",
            "of another model: norm_epsilon: 0.5, and ",
            "rotary_base: 7, and ",
        ],
    ),
}


@pytest.mark.parametrize("case", ONE_RANK_CHANGES)
def test_a_rank_that_does_not_fit_the_others_is_named(
    write_on_demand: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    name, layout, change, expected_texts = ONE_RANK_CHANGES[case]
    last_rank = {"tp2": "mp_rank_01", "ep2": "mp_rank_00_001", "pp2": "mp_rank_00_001"}[layout]
    path = copy_changed(write_on_demand(name, layout), tmp_path / "in", change, last_rank)
    stderr = convert_with_error(path, tmp_path, capsys)
    assert [text for text in expected_texts if text not in stderr] == [], stderr


TRAINING_STATES = {
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
    extra_states = {**TRAINING_STATES, **(DISTRIBUTED_STATES if distributed else {})}
    state_names = {
        name: tensor
        for name, tensor in extra_states.items()
        if tensor is not None or not distributed
    }
    state["model"].update(state_names)
    state |= {"optimizer": {"step": 3}, "opt_param_scheduler": {"lr": 1.0}, "rng_state": [1]}


ACCEPTED: dict[str, tuple[str, str, StateChange]] = {
    "states": ("llama", "one", _with_states),
    "states, distributed": ("llama", "dist", _with_states),
    "a tied output layer": (
        "llama-tied",
        "one",
        lambda state: state["model"].update(
            {OUTPUT_LAYER: state["model"]["embedding.word_embeddings.weight"]}
        ),
    ),
    "further layers": (
        "llama",
        "one",
        lambda state: (
            set_arguments(mtp_num_layers=1)(state),
            add_tensor("mtp.layers.0.enorm.weight", 32)(state),
        ),
    ),
    "padding": (
        "llama",
        "one",
        lambda state: (
            set_arguments(make_vocab_size_divisible_by=128)(state),
            state["model"].update(
                {
                    name: torch.cat([state["model"][name], torch.zeros(126, 32)])
                    for name in ("embedding.word_embeddings.weight", OUTPUT_LAYER)
                }
            ),
        ),
    ),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_training_state_is_ignored(write_on_demand: Any, tmp_path: Path, case: str) -> None:
    name, layout, change = ACCEPTED[case]
    path = copy_changed(write_on_demand(name, layout), tmp_path / "in", change)
    actual, expected = (
        detect_format(directory).read(directory).tensors
        for directory in (path, write_on_demand(name, layout))
    )
    assert actual.keys() == expected.keys()
    assert all(
        read_tensor(tensor).equal(read_tensor(expected[key])) for key, tensor in actual.items()
    )


INVALID_ARGUMENTS: dict[str, tuple[Any, str]] = {
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


@pytest.mark.parametrize("layout", ["one", "dist"])
@pytest.mark.parametrize("case", INVALID_ARGUMENTS)
def test_invalid_arguments_are_named(
    write_on_demand: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str, layout: str
) -> None:
    value, message = INVALID_ARGUMENTS[case]
    change = set_arguments(**{case.partition(",")[0]: value})
    path = copy_changed(write_on_demand("llama", layout), tmp_path / "in", change)
    assert message in convert_with_error(path, tmp_path, capsys)


UNREADABLE_FILES = {
    "empty": (b"", "model_optim_rng.pt is empty"),
    "cut": (b"PK\x03\x04 and no end", "model_optim_rng.pt is truncated"),
    "old": (b"\x80\x02}q\x00.", "model_optim_rng.pt is not a checkpoint that torch can map"),
}


@pytest.mark.parametrize("case", UNREADABLE_FILES)
def test_a_file_that_torch_cannot_map_is_named(
    write_on_demand: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    content, message = UNREADABLE_FILES[case]
    shutil.copytree(write_on_demand("llama", "one"), tmp_path / "in")
    (tmp_path / "in/release/mp_rank_00/model_optim_rng.pt").write_bytes(content)
    assert message in convert_with_error(tmp_path / "in", tmp_path, capsys)


def test_help_lists_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        convert.main(["--help"])
    assert "megatron_dist" in capsys.readouterr().out
