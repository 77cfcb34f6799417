"""Conversion of Hugging Face models both ways, with transformers as the reference."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from integration.checkpoint.foreign_lab import (
    CASES,
    RELOADED_CASES,
    SAVE_ONLY_LAYOUTS,
    SHARDED_MODELS,
    ForeignModelRuns,
    build_argv,
)
from safetensors.torch import load_file, save_file
from support.foreign_models import MODELS, MTP_MODEL, compute_logits, save_model
from support.warm_programs import run_warm_program

from flagscale import registry
from flagscale.config.arguments.compat.huggingface.config_reader import read_config
from flagscale.train.checkpoint.formats import convert
from flagscale.train.checkpoint.formats.huggingface import HuggingFace
from flagscale.train.checkpoint.formats.lazy_tensors import read_tensor

pytestmark = [pytest.mark.torch, pytest.mark.integration]

PROJECT = Path(__file__).parents[3]
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> ForeignModelRuns:
    return ForeignModelRuns(tmp_path_factory.mktemp("foreign"))


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        tensors.update(load_file(file))
    return tensors


def assert_same_weights(first: Path, second: Path) -> None:
    first_weights, second_weights = read_weights(first), read_weights(second)
    assert first_weights.keys() == second_weights.keys()
    differing = [
        n
        for n in first_weights
        if first_weights[n].dtype != second_weights[n].dtype
        or not first_weights[n].equal(second_weights[n])
    ]
    assert differing == []


def _max_difference(results: dict[str, Any]) -> float:
    differences = [
        rank["max_difference"]
        for rank in results["ranks"]
        if rank.get("max_difference") is not None
    ]
    assert differences, results
    return max(differences)


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_run_starts_from_a_model_in_any_layout(
    models: ForeignModelRuns, name: str, layout: str
) -> None:
    assert f"{name}-{layout}" in models.results, models.results["stderr"][-4000:]
    assert _max_difference(models.results[f"{name}-{layout}"]) <= TOLERANCE


@pytest.mark.parametrize(
    "case", [*(f"{name}-sharded" for name in SHARDED_MODELS), "llama-sharded-loaded"]
)
def test_a_model_in_shards_is_loaded_layer_by_layer(models: ForeignModelRuns, case: str) -> None:
    result = models.results[case]
    # The embedding is larger than a layer, except for one of experts.
    layer = (result["weights"] - 2 * result["embedding_weights"]) / 2
    assert 0 < result["most_unsharded_weights"] <= max(result["embedding_weights"], layer) * 1.1


def test_a_model_that_is_damaged_for_one_rank_fails_on_all(models: ForeignModelRuns) -> None:
    """The other ranks go through all layers with it."""
    result = models.results["llama-sharded-damaged"]
    for rank in result["ranks"]:
        assert rank["error"].startswith("rank 1: "), rank
        assert "self_attention.linear_proj.weight: " in rank["error"]


@pytest.mark.parametrize(("name", "layout"), RELOADED_CASES)
def test_a_converted_checkpoint_is_loaded_like_any_other(
    models: ForeignModelRuns, name: str, layout: str
) -> None:
    assert _max_difference(models.results[f"{name}-{layout}-loaded"]) <= TOLERANCE


@pytest.mark.parametrize(
    ("name", "layout"),
    [*CASES, *((layout_name.rpartition("-")[::2]) for layout_name in SAVE_ONLY_LAYOUTS)],
)
def test_a_saved_checkpoint_converts_back_bit_by_bit(
    models: ForeignModelRuns, tmp_path: Path, name: str, layout: str
) -> None:
    out = tmp_path / "out"
    assert (
        convert.main(
            [str(models.saved_path(name, layout)), str(out), "--like", str(models.root / name)]
        )
        == 0
    )
    assert_same_weights(models.root / name, out)


@pytest.mark.parametrize("name", MODELS)
def test_transformers_reads_what_training_saved(
    models: ForeignModelRuns, tmp_path: Path, name: str
) -> None:
    """The config.json is written from the run's arguments alone."""
    out = tmp_path / "out"
    assert convert.main([str(models.saved_path(name, "one")), str(out)]) == 0
    assert float((compute_logits(out) - models.reference[name]).abs().max()) <= TOLERANCE


def test_a_round_trip_changes_nothing(tmp_path: Path) -> None:
    """16-bit weights in several files, with a tokenizer; code is not copied."""
    source, converted, restored = tmp_path / "source", tmp_path / "converted", tmp_path / "restored"
    save_model("qwen3-moe-mixed", source, dtype="bfloat16", max_shard_size="40KB")
    assert len(list(source.glob("*.safetensors"))) > 1
    (source / "tokenizer.json").write_text('{"a": "ü"}')
    (source / "modeling_own.py").write_text("raise SystemExit")
    assert convert.main([str(source), str(converted)]) == 0
    assert convert.main([str(converted), str(restored)]) == 0
    assert_same_weights(source, restored)
    assert {tensor.dtype for tensor in read_weights(restored).values()} == {torch.bfloat16}
    assert json.loads((restored / "config.json").read_text()) == read_config(source)
    assert (restored / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert not (restored / "modeling_own.py").exists()


def test_an_incomplete_mtp_layer_is_left_out_with_a_note(
    models: ForeignModelRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The biases of V3's router keep their 32 bits among 16-bit weights."""
    source, converted, restored = tmp_path / "source", tmp_path / "converted", tmp_path / "restored"
    shutil.copytree(models.root / MTP_MODEL, source)
    _rewrite(source, lambda tensors: tensors.pop("model.layers.2.eh_proj.weight"))
    assert read_config(source)["num_nextn_predict_layers"] == 1
    assert convert.main([str(source), str(converted), "--dtype", "bf16"]) == 0
    assert "such as model.layers.2.eh_proj.weight" in capsys.readouterr().out
    assert convert.main([str(converted), str(restored)]) == 0
    assert read_config(restored)["num_nextn_predict_layers"] == 0
    config = read_weights(restored)
    expected_names = [
        name for name in read_weights(source) if not name.startswith("model.layers.2.")
    ]
    assert config.keys() == set(expected_names)
    dtypes = {name: tensor.dtype for name, tensor in config.items()}
    biases = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert biases == {"model.layers.1.mlp.gate.e_score_correction_bias"}


def test_an_mtp_layer_shares_the_embedding(
    models: ForeignModelRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    shutil.copytree(models.root / MTP_MODEL, source)
    _rewrite(source, lambda tensors: tensors["model.layers.2.embed_tokens.weight"].add_(1))
    assert convert.main([str(source), str(tmp_path / "converted")]) == 1
    assert "an embedding or output layer that differs from the model's" in capsys.readouterr().err
    model_without_mtp = HuggingFace().read(source).without_mtp()
    assert not [name for name in model_without_mtp.tensors if name.startswith("mtp.")]
    assert [
        note for note in model_without_mtp.notes if "left out: mtp_num_layers is not set" in note
    ]
    embedding = read_weights(source)["model.embed_tokens.weight"]
    assert read_tensor(model_without_mtp.tensors["embedding.word_embeddings.weight"]).equal(
        embedding
    )


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_the_command_compares_logits(
    models: ForeignModelRuns, tmp_path: Path, precision: str
) -> None:
    """fp16 is written from fp32 weights of a config.json that says bfloat16."""
    source = models.converted_path("llama")
    if precision == "fp16":
        source = Path(shutil.copytree(models.root / "llama", tmp_path / "source"))
        _change_config(source, dtype="bfloat16")
    words = ["convert", str(source), str(tmp_path / "out"), "--dtype", precision]
    process = subprocess.run(
        [sys.executable, "-m", "flagscale.cli", *words, "--check", "5,9,2"],
        capture_output=True,
        text=True,
        cwd=PROJECT,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert "logits on 3 tokens: at most" in process.stdout


def test_an_invalid_token_is_reported_before_anything_is_written(
    models: ForeignModelRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = models.converted_path("llama"), tmp_path / "none"
    assert convert.main([str(source), str(target), "--check", "5,9,9999"]) == 1
    assert not target.exists()
    assert "--check: 9999 is not below the vocabulary size" in capsys.readouterr().err


def test_a_run_starts_from_a_model_and_exports_it(tmp_path: Path) -> None:
    """The training program runs in 16 bits, where the optimizer has copies of its own.

    With a learning rate of zero, the exported model equals the pretrained one.
    """
    source, out = tmp_path / "source", tmp_path / "out"
    save_model("mixtral", source, dtype="bfloat16")
    (source / "tokenizer.json").write_text("{}")
    run_arguments = build_argv("mixtral", source, "ep2")
    run_arguments += f"--pretrained-checkpoint {source} --save {tmp_path / 'saved'}".split()
    run_arguments += f"--export-huggingface {out} --bf16 --use-distributed-optimizer --lr 0".split()
    process = run_warm_program(
        PROJECT / "flagscale" / "train" / "train_gpt.py",
        run_arguments,
        ranks=2,
        environment=os.environ,
        cwd=PROJECT,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    assert f"weights from {source}" in process.stdout
    assert f"exported to {out / 'iter_0000001'}" in process.stdout
    assert_same_weights(source, out / "iter_0000001")
    assert read_config(out / "iter_0000001") == read_config(source)
    assert (out / "iter_0000001" / "tokenizer.json").is_file()


MEGATRON_LAYOUTS = [
    pytest.param("llama", (2, 2, 1), True, id="llama-tp2-pp2"),
    pytest.param("qwen2", (1, 2, 1), True, id="qwen2-pp2-vpp2"),
    pytest.param("gpt2", (2, 1, 1), False, id="gpt2-tp2"),
    pytest.param("qwen3-moe-mixed", (2, 1, 2), True, id="moe-tp2-ep2"),
    pytest.param("mixtral", (1, 2, 2), False, id="mixtral-pp2-ep2"),
]


@pytest.mark.parametrize(("name", "sizes", "transformer_engine"), MEGATRON_LAYOUTS)
def test_a_checkpoint_of_megatron_in_its_torch_format(
    models: ForeignModelRuns,
    tmp_path: Path,
    name: str,
    sizes: tuple[int, int, int],
    transformer_engine: bool,
) -> None:
    written, out = tmp_path / "written", tmp_path / "out"
    chunks = 2 if name == "qwen2" else 1
    mark = models.write_as_megatron(
        name, written, sizes, transformer_engine=transformer_engine, chunks=chunks
    )
    assert convert.main([str(written), str(out), "--to", "huggingface"]) == 0
    assert_same_weights(models.root / name, out)
    assert not mark.exists()


def test_a_run_starts_from_a_checkpoint_of_megatron(models: ForeignModelRuns) -> None:
    assert _max_difference(models.results["qwen3-pp2-megatron"]) <= TOLERANCE


def test_a_rank_that_megatron_did_not_write_is_named(
    models: ForeignModelRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models.write_as_megatron("llama", tmp_path / "in", (2, 1, 1), transformer_engine=True)
    (missing,) = (tmp_path / "in").glob("*/mp_rank_01/*")
    missing.unlink()
    assert convert.main([str(tmp_path / "in"), str(tmp_path / "out")]) == 1
    assert f"{missing} is missing" in capsys.readouterr().err


# --- refused models -------------------------------------------------------------------------


def _change_config(path: Path, **values: Any) -> None:
    config = {**read_config(path), **values}
    (path / "config.json").write_text(json.dumps(config))


def _truncate(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def _write_header(path: Path, text: bytes, data: bytes = b"") -> None:
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


def _delete_tensors(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.0.self_attn.k_proj.weight"], tensors["lm_head.weight"]


def _reshape_tensor(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].reshape(-1, 24)


def _write_index(path: Path, name: str) -> None:
    weight_map = dict.fromkeys(load_file(path / "model.safetensors"), name)
    _replace_with_index(path, json.dumps({"weight_map": weight_map}))


def _replace_with_index(path: Path, text: str) -> None:
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(text)


ModelChange = Callable[[Path], object]
DAMAGED_MODELS: dict[str, tuple[ModelChange, list[str]]] = {
    "cut": (_truncate, ["model.safetensors is truncated", "of which there are"]),
    "empty": (lambda p: (p / "model.safetensors").write_bytes(b""), ["is truncated"]),
    "long header": (
        lambda p: (p / "model.safetensors").write_bytes(b"\xff" * 64),
        ["is truncated, or not a safetensors file"],
    ),
    "damaged header": (lambda p: _write_header(p, b"{'a'"), ["the header is damaged"]),
    "sizes that do not agree": (
        lambda p: _write_header(p, b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,4]}}'),
        ["a: the header is damaged"],
    ),
    "overlapping tensors": (
        lambda p: _write_header(
            p,
            b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
            b'"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}} ',
            b"x",
        ),
        ["a and b overlap"],
    ),
    "missing tensors": (
        lambda p: _rewrite(p, _delete_tensors),
        ["in lacks tensors: ", "model.layers.0.self_attn.k_proj.weight", "lm_head.weight"],
    ),
    "wrong shape": (
        lambda p: _rewrite(p, _reshape_tensor),
        ["model.layers.1.mlp.up_proj.weight: expected shape [48, 32], found [64, 24]"],
    ),
    "extra tensors": (
        lambda p: _rewrite(p, lambda t: t.update(extra=torch.ones(2))),
        ["has tensors that no llama model has: extra"],
    ),
    "unlike precisions": (
        lambda p: _rewrite(
            p,
            lambda t: t.update(
                {n: x.half() for n, x in t.items() if n == "model.layers.0.mlp.up_proj.weight"}
            ),
        ),
        ["one precision expected, found float16 and float32"],
    ),
    "weights of 8 bits": (
        lambda p: _rewrite(
            p, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].char()})
        ),
        ["model.norm.weight: expected weights of 16 bits or more, found int8"],
    ),
    "no numbers": (
        lambda p: _rewrite(p, lambda t: t["model.norm.weight"].fill_(float("nan"))),
        ["/in cannot be used: decoder.final_layernorm.weight: it holds infinities or NaN"],
    ),
    "path out of the directory": (
        lambda p: _write_index(p, "../secret.safetensors"),
        ["expected the name of a .safetensors file", "../secret.safetensors"],
    ),
    "absolute path": (
        lambda p: _write_index(p, "/etc/passwd.safetensors"),
        ["found '/etc/passwd.sa"],
    ),
    "file that is not there": (
        lambda p: _write_index(p, "other.safetensors"),
        ["other.safetensors is"],
    ),
    "index without files": (
        lambda p: _replace_with_index(p, "{}"),
        ["weight_map: expected files"],
    ),
    "endless config.json": (
        lambda p: (p / "config.json").write_text('{"a": "' + "x" * (1 << 21) + '"}'),
        ["config.json: expected at most 1,048,576 bytes"],
    ),
    "nested config.json": (
        lambda p: (p / "config.json").write_text("[" * 100_000),
        ["config.json is not valid JSON"],
    ),
    "other sizes": (
        lambda p: _change_config(p, num_hidden_layers=3),
        ["lacks tensors", "model.layers.2.input_layernorm.weight"],
    ),
}


@pytest.mark.parametrize("case", DAMAGED_MODELS)
def test_damaged_or_hostile_models_are_refused(
    models: ForeignModelRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    shutil.copytree(models.root / "llama", source)
    change, expected_texts = DAMAGED_MODELS[case]
    change(source)
    assert convert.main([str(source), str(target)]) == 1
    stderr = capsys.readouterr().err
    assert [text for text in expected_texts if text not in stderr] == [], stderr
    assert "Traceback" not in stderr
    remaining = list(target.rglob("*")) if target.exists() else []
    assert [path for path in remaining if path.is_file()] == []


class CodeExecution:
    """Object that runs code when it is unpickled without restrictions."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self.mark),)

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)


def test_a_checkpoint_from_elsewhere_runs_no_code(
    models: ForeignModelRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import pickle

    shutil.copytree(models.converted_path("llama") / "iter_0000000", tmp_path / "in")
    (tmp_path / "in" / "manifest.json").unlink()
    (tmp_path / "in" / ".metadata").write_bytes(pickle.dumps(CodeExecution(tmp_path / "mark")))
    assert convert.main([str(tmp_path / "in"), str(tmp_path / "out")]) == 1
    assert not (tmp_path / "mark").exists()
    assert capsys.readouterr().err.startswith("error: ")


def test_the_config_of_another_model_is_refused(
    models: ForeignModelRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    like = ["--like", str(models.root / "llama-linear")]
    assert convert.main([str(models.converted_path("llama")), str(tmp_path / "out"), *like]) == 1
    stderr = capsys.readouterr().err
    assert "llama-linear is another model" in stderr
    assert "rotary_base: 500000, but config.json has 10000" in stderr


@pytest.mark.parametrize("direction", ["in", "out"])
def test_a_full_disk_is_reported_and_leaves_nothing(
    models: ForeignModelRuns, tmp_path: Path, capfd: pytest.CaptureFixture[str], direction: str
) -> None:
    source = models.root / "llama" if direction == "in" else models.converted_path("llama")
    target = tmp_path / "out"
    if (child := os.fork()) == 0:
        # A limit on the size of files replaces the full disk: writing fails in the same places.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        code = convert.main([str(source), str(target)])
        sys.stderr.flush()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert f"error: {target}: File too large" in capfd.readouterr().err
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_target_in_use_is_left_alone(
    models: ForeignModelRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    assert convert.main([str(models.root / "llama"), str(tmp_path / "out")]) == 1
    assert "already exists" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_a_package_brings_a_format(
    models: ForeignModelRuns,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    package = tmp_path / "package"
    (package / "plain-1.0.dist-info").mkdir(parents=True)
    shutil.copy(PROJECT / "tests" / "outside" / "plain_format.py", package)
    entry = "[flagscale.checkpoint_formats]\nplain = plain_format:Plain\n"
    (package / "plain-1.0.dist-info" / "entry_points.txt").write_text(entry)
    metadata = "Metadata-Version: 2.1\nName: plain\nVersion: 1.0\n"
    (package / "plain-1.0.dist-info" / "METADATA").write_text(metadata)
    source, restored = str(tmp_path / "plain"), str(tmp_path / "restored")
    assert convert.main([str(models.converted_path("qwen3")), source, "--to", "plain"]) == 2
    assert "no checkpoint format is called 'plain'; known: huggingface" in capsys.readouterr().err
    monkeypatch.syspath_prepend(package)
    registry._load_entry_points.cache_clear()
    try:
        assert convert.main([str(models.converted_path("qwen3")), source, "--to", "plain"]) == 0
        assert convert.main([source, restored, "--to", "huggingface"]) == 0
    finally:
        registry._load_entry_points.cache_clear()
    assert_same_weights(models.root / "qwen3", Path(restored))
