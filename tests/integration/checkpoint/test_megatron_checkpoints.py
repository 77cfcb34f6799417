"""Checkpoints for and from Megatron-LM, compared with the documented file formats."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import megatron_files
from support.foreign_models import save
from torch.distributed import checkpoint as dcp

from flagscale.checkpoint_metadata import read_metadata
from flagscale.train.checkpoint.formats import convert
from flagscale.train.checkpoint.formats.base import detect_format
from flagscale.train.checkpoint.formats.lazy_tensors import read_tensor
from flagscale.train.checkpoint.formats.megatron_layout import extract_values

pytestmark = [pytest.mark.torch, pytest.mark.integration]

PROJECT = Path(__file__).parents[3]
FILE = "model_optim_rng.pt"
PADDED = 132
"""Rows of the vocabulary of 130 with padding: what all layouts here can cut."""


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Convert models on demand; return their FlagScale checkpoints by the model's name."""
    root = tmp_path_factory.mktemp("ours")

    def made(name: str) -> Path:
        if not (root / name).exists():
            save(name, root / f"{name}-hf")
            assert convert.main([str(root / f"{name}-hf"), str(root / name)]) == 0
        return root / name

    return made


def whole(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Read all tensors and the arguments of a model.

    Multi-token prediction layers are left out, as in Megatron-LM's formats.
    """
    model = detect_format(path).read(path).without_mtp()
    return {name: read_tensor(tensor).clone() for name, tensor in model.tensors.items()}, {
        **model.values
    }


def assert_same_model(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not actual[name].equal(expected[name])] == []


def rank_files(path: Path) -> dict[str, dict[str, Any]]:
    """Read the files of all ranks by directory, as Megatron-LM does, without running code."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        return {
            file.parent.name: torch.load(file, map_location="cpu", weights_only=True)
            for file in path.glob(f"*/*/{FILE}")
        }


def tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        f"{chunk}.{name}": tensor
        for chunk, weights in state.items()
        if chunk.startswith("model")
        for name, tensor in weights.items()
        if tensor is not None
    }


LAYOUTS = [
    pytest.param("llama", (2, 2, 1), True, 1, id="llama-tp2-pp2"),
    pytest.param("llama-biases", (2, 1, 1), False, 1, id="biases-tp2-local"),
    pytest.param("qwen2", (1, 2, 1), True, 2, id="qwen2-pp2-vpp2"),
    pytest.param("gpt2", (2, 1, 1), False, 1, id="gpt2-tp2-local"),
    pytest.param("qwen3-moe-mixed", (2, 1, 2), True, 1, id="moe-tp2-ep2-grouped"),
    pytest.param("mixtral", (1, 2, 4), False, 1, id="mixtral-pp2-ep4-local"),
    pytest.param("deepseek-v3", (2, 2, 2), True, 1, id="latent-tp2-pp2-ep2"),
    pytest.param("deepseek-v2", (2, 1, 1), False, 1, id="latent-tp2-local"),
]


@pytest.mark.parametrize(("name", "sizes", "engine", "chunks"), LAYOUTS)
def test_each_rank_gets_what_the_documented_layout_gives_it(
    ours: Any, tmp_path: Path, name: str, sizes: tuple[int, int, int], engine: bool, chunks: int
) -> None:
    """Compared with another writer of that layout, and converted back bit by bit."""
    theirs, documented, back = (tmp_path / word for word in ("theirs", "documented", "back"))
    weights, values = whole(ours(name))
    words = ["--to", "torch", "--make-vocab-size-divisible-by", str(PADDED // sizes[0])]
    parts = ("tensor", "pipeline", "expert")
    for part, size in zip(parts, sizes, strict=True):
        words += [f"--{part}-model-parallel-size", str(size)]
    words += ["--num-virtual-stages-per-pipeline-rank", str(chunks)]
    words += ["--moe-grouped-gemm"] if engine else ["--transformer-impl", "local"]
    assert convert.main([str(ours(name)), str(theirs), *words]) == 0

    padded = dict(weights)
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if key in padded:
            padded[key] = torch.cat([padded[key], torch.zeros(2, padded[key].shape[1])])
    megatron_files.write_checkpoint(
        documented,
        padded,
        values,
        sizes=sizes,
        engine=engine,
        mark=None,
        chunks=chunks,
    )
    actual, expected = rank_files(theirs), rank_files(documented)
    assert actual.keys() == expected.keys()
    tied = "output_layer.weight" not in weights
    for rank, state in actual.items():
        written = tensors(state)
        if tied and sizes[1] > 1:
            written.pop("model.output_layer.weight", None)
        assert_same_model(written, tensors(expected[rank]))
        assert state["args"].padded_vocab_size == PADDED
    assert (theirs / "latest_checkpointed_iteration.txt").read_text() == "release\n"

    assert convert.main([str(theirs), str(back), "--to", "torch_dist"]) == 0
    assert_same_model(whole(back)[0], weights)
    assert whole(back)[1] == values


def test_a_tied_model_has_its_output_layer_on_the_last_stage(ours: Any, tmp_path: Path) -> None:
    words = ["--to", "torch", "--pipeline-model-parallel-size", "2"]
    assert convert.main([str(ours("llama-tied")), str(tmp_path / "out"), *words]) == 0
    ranks = rank_files(tmp_path / "out")
    first, last = ranks["mp_rank_00_000"]["model"], ranks["mp_rank_00_001"]["model"]
    assert last["output_layer.weight"].equal(first["embedding.word_embeddings.weight"])
    assert "output_layer.weight" not in first


def test_a_tokenizer_that_does_not_count_the_end_of_a_document() -> None:
    """Megatron-LM's arguments record 127 tokens and one more, none of which is padding."""
    args = {"vocab_size": 127, "padded_vocab_size": 128, "num_attention_heads": 1}
    assert extract_values({**args, "tokenizer_type": "NullTokenizer"})["vocab_size"] == 128
    assert extract_values({**args, "tokenizer_type": "GPT2BPETokenizer"})["vocab_size"] == 127


def test_stages_of_unlike_sizes(ours: Any, tmp_path: Path) -> None:
    words = ["--to", "torch", "--pipeline-model-parallel-size", "2"]
    words += ["--decoder-first-pipeline-num-layers", "1"]
    theirs = tmp_path / "theirs"
    assert convert.main([str(ours("qwen2")), str(theirs), *words]) == 0
    counts = {
        rank: len({name.split(".")[3] for name in tensors(state) if ".layers." in name})
        for rank, state in rank_files(theirs).items()
    }
    assert counts == {"mp_rank_00_000": 1, "mp_rank_00_001": 3}
    assert_same_model(whole(theirs)[0], whole(ours("qwen2"))[0])


REFUSED: dict[str, tuple[str, list[str], str]] = {
    "heads": ("llama", ["--tensor-model-parallel-size", "4"], "num_query_groups: 2 cannot be"),
    "layers": ("llama", ["--pipeline-model-parallel-size", "3"], "2 layers cannot be shared out"),
    "no experts": ("llama", ["--expert-model-parallel-size", "2"], "a model without experts"),
    "experts": ("mixtral", ["--expert-model-parallel-size", "3"], "num_moe_experts: 4 cannot be"),
    "grouped, local": (
        "mixtral",
        ["--moe-grouped-gemm", "--transformer-impl", "local"],
        "moe_grouped_gemm is written for Transformer Engine's layers alone",
    ),
    "of another family": ("gemma2", [], "its layers lack norms behind attention and MLP"),
    "chunks of one stage": (
        "llama",
        ["--num-virtual-stages-per-pipeline-rank", "2"],
        "several chunks a stage take several stages",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_impossible_layout_is_refused(
    ours: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    name, words, message = REFUSED[case]
    assert convert.main([str(ours(name)), str(tmp_path / "out"), "--to", "torch", *words]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_layout_is_for_formats_that_have_one(
    ours: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--tensor-model-parallel-size", "2"]
    assert convert.main([str(ours("llama")), str(tmp_path / "out"), *words]) == 1
    assert "huggingface is of no layout: any one loads it" in capsys.readouterr().err


@pytest.mark.slow
def test_logits_are_compared_with_what_transformers_reads(
    ours: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--to", "torch", "--check", "1,2,3"]
    assert convert.main([str(ours("llama")), str(tmp_path / "out"), *words]) == 1
    assert "transformers, which reads neither torch_dist nor torch" in capsys.readouterr().err
    there = ours("llama").with_name("llama-hf")
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "flagscale.cli",
            "convert",
            str(there),
            str(tmp_path / "out"),
            *words,
        ],
        capture_output=True,
        text=True,
        cwd=PROJECT,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert "logits on 3 tokens: at most" in process.stdout


def _as_theirs(weights: dict[str, torch.Tensor], *, alike: bool) -> dict[str, torch.Tensor]:
    """Return weights in Megatron-LM's ``torch_dist`` naming with Transformer Engine's layers.

    Tensors of homogeneous layers are stacked.
    """
    sparse = {key.partition(".mlp.")[0] for key in weights if ".mlp.router." in key}
    actual: dict[str, list[torch.Tensor]] = {}
    for key, tensor in weights.items():
        name = key
        if ".self_attention.linear_kv_up_proj." in "".join(weights):
            name = re.sub(r"\.(q|kv)_layernorm\.", r".linear_\1_up_proj.layer_norm_", name)
            if name.partition(".pre_mlp")[0] not in sparse:
                name = name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        elif name.partition(".mlp.")[0] in sparse:
            name = name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
        actual.setdefault(re.sub(r"layers\.\d+", "layers", name) if alike else name, []).append(
            tensor
        )
    return {
        name: torch.stack(each) if alike and ".layers." in name else each[0]
        for name, each in actual.items()
    }


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3-moe-mixed", "deepseek-v3"])
def test_megatrons_torch_dist_format(ours: Any, tmp_path: Path, name: str) -> None:
    """Read as its programs write it, written as they read it, and converted back bit by bit."""
    weights, values = whole(ours(name))
    path, out, again = tmp_path / "theirs" / "iter_0000005", tmp_path / "out", tmp_path / "again"
    path.mkdir(parents=True)
    (tmp_path / "theirs" / "latest_checkpointed_iteration.txt").write_text("5")
    alike = not values["num_moe_experts"] or all(values["moe_layer_freq"])
    named = _as_theirs(weights, alike=alike)
    optimizer = {"optimizer.state.exp_avg.decoder.final_layernorm.weight": torch.zeros(32)}
    dcp.save(named | optimizer, checkpoint_id=path, no_dist=True)
    args = megatron_files.build_arguments(values, (1, 1, 1), 130, Path("unused"))
    torch.save({"args": args, "iteration": 5, "checkpoint_version": 3.0}, path / "common.pt")
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    assert convert.main([str(path.parent), str(out), "--to", "torch_dist"]) == 0
    assert_same_model(whole(out)[0], weights)
    assert whole(out)[1] == values

    words = ["--to", "megatron_dist", "--make-vocab-size-divisible-by", str(PADDED)]
    assert convert.main([str(out), str(again), *words]) == 0
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        named[key] = torch.cat([named[key], torch.zeros(2, named[key].shape[1])])
    actual = {key: torch.full_like(tensor, 7) for key, tensor in named.items()}
    dcp.load(actual, checkpoint_id=again / "release", no_dist=True)
    assert_same_model(actual, named)
    common = {*read_metadata(again / "release").state_dict_metadata}
    assert {key for key in common if "_extra_state" not in key} == set(named)
    assert convert.main([str(again), str(tmp_path / "back"), "--to", "torch_dist"]) == 0
    assert_same_model(whole(tmp_path / "back")[0], weights)
    assert whole(tmp_path / "back")[1] == values
