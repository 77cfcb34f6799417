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
from support.foreign_models import save_model
from torch.distributed import checkpoint as dcp

from flagscale.checkpoint_metadata import read_metadata
from flagscale.train.checkpoint.formats import convert
from flagscale.train.checkpoint.formats.base import detect_format
from flagscale.train.checkpoint.formats.lazy_tensors import read_tensor
from flagscale.train.checkpoint.formats.megatron_layout import extract_values

pytestmark = [pytest.mark.torch, pytest.mark.integration]

PROJECT = Path(__file__).parents[3]
RANK_FILE = "model_optim_rng.pt"
PADDED_VOCAB_SIZE = 132
"""Rows of the vocabulary of 130 tokens with padding, which all layouts here divide."""


@pytest.fixture(scope="module")
def convert_on_demand(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Convert models on demand; return their FlagScale checkpoints by the model's name."""
    root = tmp_path_factory.mktemp("ours")

    def convert_model(name: str) -> Path:
        if not (root / name).exists():
            save_model(name, root / f"{name}-hf")
            assert convert.main([str(root / f"{name}-hf"), str(root / name)]) == 0
        return root / name

    return convert_model


def read_model(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
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


def read_rank_files(path: Path) -> dict[str, dict[str, Any]]:
    """Read the files of all ranks by directory, as Megatron-LM does, without running code."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        return {
            file.parent.name: torch.load(file, map_location="cpu", weights_only=True)
            for file in path.glob(f"*/*/{RANK_FILE}")
        }


def list_tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
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


@pytest.mark.parametrize(("name", "sizes", "transformer_engine", "chunks"), LAYOUTS)
def test_each_rank_gets_what_the_documented_layout_gives_it(
    convert_on_demand: Any,
    tmp_path: Path,
    name: str,
    sizes: tuple[int, int, int],
    transformer_engine: bool,
    chunks: int,
) -> None:
    """The files equal those of a reference writer, and are converted back bit by bit."""
    written, reference, restored = (
        tmp_path / directory for directory in ("written", "reference", "restored")
    )
    weights, values = read_model(convert_on_demand(name))
    options = [
        "--to",
        "torch",
        "--make-vocab-size-divisible-by",
        str(PADDED_VOCAB_SIZE // sizes[0]),
    ]
    parallelisms = ("tensor", "pipeline", "expert")
    for parallelism, size in zip(parallelisms, sizes, strict=True):
        options += [f"--{parallelism}-model-parallel-size", str(size)]
    options += ["--num-virtual-stages-per-pipeline-rank", str(chunks)]
    options += ["--moe-grouped-gemm"] if transformer_engine else ["--transformer-impl", "local"]
    assert convert.main([str(convert_on_demand(name)), str(written), *options]) == 0

    padded = dict(weights)
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if key in padded:
            padded[key] = torch.cat([padded[key], torch.zeros(2, padded[key].shape[1])])
    megatron_files.write_checkpoint(
        reference,
        padded,
        values,
        sizes=sizes,
        transformer_engine=transformer_engine,
        mark_path=None,
        chunks=chunks,
    )
    actual, expected = read_rank_files(written), read_rank_files(reference)
    assert actual.keys() == expected.keys()
    is_tied = "output_layer.weight" not in weights
    for rank, state in actual.items():
        rank_tensors = list_tensors(state)
        if is_tied and sizes[1] > 1:
            rank_tensors.pop("model.output_layer.weight", None)
        assert_same_model(rank_tensors, list_tensors(expected[rank]))
        assert state["args"].padded_vocab_size == PADDED_VOCAB_SIZE
    assert (written / "latest_checkpointed_iteration.txt").read_text() == "release\n"

    assert convert.main([str(written), str(restored), "--to", "torch_dist"]) == 0
    assert_same_model(read_model(restored)[0], weights)
    assert read_model(restored)[1] == values


def test_a_tied_model_has_its_output_layer_on_the_last_stage(
    convert_on_demand: Any, tmp_path: Path
) -> None:
    options = ["--to", "torch", "--pipeline-model-parallel-size", "2"]
    assert (
        convert.main([str(convert_on_demand("llama-tied")), str(tmp_path / "out"), *options]) == 0
    )
    ranks = read_rank_files(tmp_path / "out")
    first, last = ranks["mp_rank_00_000"]["model"], ranks["mp_rank_00_001"]["model"]
    assert last["output_layer.weight"].equal(first["embedding.word_embeddings.weight"])
    assert "output_layer.weight" not in first


def test_end_of_document_is_counted_for_null_tokenizers() -> None:
    """Megatron-LM's arguments record 127 tokens and one more, none of which is padding."""
    args = {"vocab_size": 127, "padded_vocab_size": 128, "num_attention_heads": 1}
    assert extract_values({**args, "tokenizer_type": "NullTokenizer"})["vocab_size"] == 128
    assert extract_values({**args, "tokenizer_type": "GPT2BPETokenizer"})["vocab_size"] == 127


def test_the_first_stage_may_have_fewer_layers(convert_on_demand: Any, tmp_path: Path) -> None:
    options = ["--to", "torch", "--pipeline-model-parallel-size", "2"]
    options += ["--decoder-first-pipeline-num-layers", "1"]
    written = tmp_path / "written"
    assert convert.main([str(convert_on_demand("qwen2")), str(written), *options]) == 0
    counts = {
        rank: len({name.split(".")[3] for name in list_tensors(state) if ".layers." in name})
        for rank, state in read_rank_files(written).items()
    }
    assert counts == {"mp_rank_00_000": 1, "mp_rank_00_001": 3}
    assert_same_model(read_model(written)[0], read_model(convert_on_demand("qwen2"))[0])


IMPOSSIBLE_LAYOUTS: dict[str, tuple[str, list[str], str]] = {
    "heads": ("llama", ["--tensor-model-parallel-size", "4"], "num_query_groups: 2 cannot be"),
    "layers": ("llama", ["--pipeline-model-parallel-size", "3"], "2 layers cannot be divided"),
    "no experts": ("llama", ["--expert-model-parallel-size", "2"], "a model without experts"),
    "experts": ("mixtral", ["--expert-model-parallel-size", "3"], "num_moe_experts: 4 cannot be"),
    "grouped, local": (
        "mixtral",
        ["--moe-grouped-gemm", "--transformer-impl", "local"],
        "moe_grouped_gemm is supported for Transformer Engine's layers only",
    ),
    "of another family": ("gemma2", [], "its layers lack norms behind attention and MLP"),
    "chunks of one stage": (
        "llama",
        ["--num-virtual-stages-per-pipeline-rank", "2"],
        "several model chunks per stage require several stages",
    ),
}


@pytest.mark.parametrize("case", IMPOSSIBLE_LAYOUTS)
def test_an_impossible_layout_is_refused(
    convert_on_demand: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    name, options, message = IMPOSSIBLE_LAYOUTS[case]
    assert (
        convert.main(
            [str(convert_on_demand(name)), str(tmp_path / "out"), "--to", "torch", *options]
        )
        == 1
    )
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_layout_options_are_refused_for_formats_without_layout(
    convert_on_demand: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--tensor-model-parallel-size", "2"]
    assert convert.main([str(convert_on_demand("llama")), str(tmp_path / "out"), *options]) == 1
    assert (
        "huggingface does not depend on the layout: any layout can load it"
        in capsys.readouterr().err
    )


@pytest.mark.slow
def test_logits_are_compared_with_what_transformers_reads(
    convert_on_demand: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--to", "torch", "--check", "1,2,3"]
    assert convert.main([str(convert_on_demand("llama")), str(tmp_path / "out"), *options]) == 1
    assert "transformers, which reads neither torch_dist nor torch" in capsys.readouterr().err
    source = convert_on_demand("llama").with_name("llama-hf")
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "flagscale.cli",
            "convert",
            str(source),
            str(tmp_path / "out"),
            *options,
        ],
        capture_output=True,
        text=True,
        cwd=PROJECT,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert "logits on 3 tokens: at most" in process.stdout


def _name_as_megatron(
    weights: dict[str, torch.Tensor], *, homogeneous: bool
) -> dict[str, torch.Tensor]:
    """Return weights in Megatron-LM's ``torch_dist`` naming with Transformer Engine's layers.

    Tensors of homogeneous layers are stacked.
    """
    layers_with_experts = {key.partition(".mlp.")[0] for key in weights if ".mlp.router." in key}
    actual: dict[str, list[torch.Tensor]] = {}
    for key, tensor in weights.items():
        name = key
        if ".self_attention.linear_kv_up_proj." in "".join(weights):
            name = re.sub(r"\.(q|kv)_layernorm\.", r".linear_\1_up_proj.layer_norm_", name)
            if name.partition(".pre_mlp")[0] not in layers_with_experts:
                name = name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        elif name.partition(".mlp.")[0] in layers_with_experts:
            name = name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
        actual.setdefault(
            re.sub(r"layers\.\d+", "layers", name) if homogeneous else name, []
        ).append(tensor)
    return {
        name: torch.stack(each) if homogeneous and ".layers." in name else each[0]
        for name, each in actual.items()
    }


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3-moe-mixed", "deepseek-v3"])
def test_torch_dist_format_is_read_and_written(
    convert_on_demand: Any, tmp_path: Path, name: str
) -> None:
    """Checkpoints are read as Megatron-LM writes them, and written as it reads them.

    They are converted back bit by bit.
    """
    weights, values = read_model(convert_on_demand(name))
    path = tmp_path / "theirs" / "iter_0000005"
    out, megatron_path = tmp_path / "out", tmp_path / "again"
    path.mkdir(parents=True)
    (tmp_path / "theirs" / "latest_checkpointed_iteration.txt").write_text("5")
    homogeneous = not values["num_moe_experts"] or all(values["moe_layer_freq"])
    megatron_weights = _name_as_megatron(weights, homogeneous=homogeneous)
    optimizer = {"optimizer.state.exp_avg.decoder.final_layernorm.weight": torch.zeros(32)}
    dcp.save(megatron_weights | optimizer, checkpoint_id=path, no_dist=True)
    args = megatron_files.build_arguments(values, (1, 1, 1), 130, Path("unused"))
    torch.save({"args": args, "iteration": 5, "checkpoint_version": 3.0}, path / "common.pt")
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    assert convert.main([str(path.parent), str(out), "--to", "torch_dist"]) == 0
    assert_same_model(read_model(out)[0], weights)
    assert read_model(out)[1] == values

    options = ["--to", "megatron_dist", "--make-vocab-size-divisible-by", str(PADDED_VOCAB_SIZE)]
    assert convert.main([str(out), str(megatron_path), *options]) == 0
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        megatron_weights[key] = torch.cat(
            [megatron_weights[key], torch.zeros(2, megatron_weights[key].shape[1])]
        )
    actual = {key: torch.full_like(tensor, 7) for key, tensor in megatron_weights.items()}
    dcp.load(actual, checkpoint_id=megatron_path / "release", no_dist=True)
    assert_same_model(actual, megatron_weights)
    stored_names = {*read_metadata(megatron_path / "release").state_dict_metadata}
    assert {key for key in stored_names if "_extra_state" not in key} == set(megatron_weights)
    assert convert.main([str(megatron_path), str(tmp_path / "back"), "--to", "torch_dist"]) == 0
    assert_same_model(read_model(tmp_path / "back")[0], weights)
    assert read_model(tmp_path / "back")[1] == values
