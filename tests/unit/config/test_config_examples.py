"""Every example composes and loads; the reference pages are up to date."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from flagscale.config.arguments.derive import derive_arguments
from flagscale.config.arguments.spec.command_line import command_line, parse_arguments
from flagscale.config.arguments.spec.registry import arguments
from flagscale.config.checks import check_world, experiment_notes
from flagscale.config.explain import explain
from flagscale.config.load import load
from flagscale.config.reference import DIRECTORY, INDEX, render
from flagscale.errors import ConfigError
from flagscale.estimate.forecast import forecast_step
from flagscale.hosts.hostfile import read_hostfile

REPOSITORY = Path(__file__).resolve().parents[3]
CONF = REPOSITORY / "examples" / "llama3" / "conf"
WORLDS = {
    "tiny": [1, 2, 8],
    "tiny_3.2": [1, 2, 8],
    "1b": [8, 16],
    "8b": [1, 8, 16],
    "70b": [32, 64],
    "tiny_hetero": [4],
    "8b_hetero": [32],
    "8b_128k": [8, 16],
    "8b_one_gpu": [1, 2, 8],
    "8b_two_gpus": [2, 8],
    "70b_eight_gpus": [8, 16],
}


def test_example_hostfile_is_read() -> None:
    hosts = read_hostfile(REPOSITORY / "examples" / "llama3" / "hostfile")
    assert [host.name for host in hosts] == ["node01", "node02", "node03", "node04"]
    assert hosts[1].addr == "10.0.0.2"


def test_every_llama3_example_is_tested() -> None:
    assert {p.stem for p in (CONF / "train").glob("*.yaml")} == set(WORLDS)


@pytest.mark.parametrize("name", WORLDS)
def test_llama3_example_is_valid(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    overrides = [f"train={name}", "action=dryrun"]
    experiment = load(CONF, "train", overrides).experiment
    parsed = parse_arguments(command_line(experiment.train))
    assert (parsed.normalization, parsed.swiglu, parsed.add_bias_linear) == ("RMSNorm", True, False)
    assert parsed.data_path[0].startswith("/")
    for world in WORLDS[name]:
        assert check_world(experiment, world) == []
        assert not any("is not an integer" in note for note in experiment_notes(experiment, world))


FAMILIES = {
    "deepseek": {"tiny": [1, 8], "tiny_v2": [1, 8], "v2_lite": [16], "v3": [2048]},
    "gemma": {"tiny": [1, 8], "tiny_2": [1, 8], "2b": [8], "27b": [16, 32]},
    "gpt2": {"tiny": [1, 8], "1.5b": [8]},
    "mistral": {"tiny": [1, 8], "tiny_dense": [1, 8], "7b": [8], "8x7b": [32]},
    "qwen2.5": {"tiny": [1, 8], "7b": [8]},
    "qwen3": {"tiny_pretraining": [1, 8], "tiny_moe": [1, 8], "30b_a3b": [32]},
}
"""Examples of model families, each with supported numbers of ranks."""
FINE_TUNING = {"qwen3": {"tiny", "8b", "tiny_dpo", "8b_dpo"}}
"""Examples that start from a checkpoint; separate tests cover them."""
BILLIONS = {
    ("deepseek", "v2_lite"): 15.706484224,
    ("deepseek", "v3"): 671.026404352 + 11.610067968,  # plus the multi-token prediction layer
    ("gemma", "2b"): 2.614341888,
    ("gemma", "27b"): 27.009346304,
    ("llama3", "1b"): 1.2358144,
    ("gpt2", "1.5b"): 1.5576112,
    ("mistral", "7b"): 7.241732096,
    ("mistral", "8x7b"): 46.702792704,
    ("qwen2.5", "7b"): 7.615616512,
    ("qwen3", "30b_a3b"): 30.532122624,
}
"""Billions of parameters of the published models, as counted by transformers (no buffers)."""


@pytest.mark.parametrize("name", FAMILIES)
def test_examples_of_model_families_are_valid(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    conf = REPOSITORY / "examples" / name / "conf"
    listed = set(FAMILIES[name]) | FINE_TUNING.get(name, set())
    assert {path.stem for path in (conf / "train").glob("*.yaml")} == listed
    for choice, worlds in FAMILIES[name].items():
        experiment = load(conf, "train", [f"train={choice}", "action=dryrun"]).experiment
        for world in worlds:
            assert check_world(experiment, world) == []
            assert [
                n for n in experiment_notes(experiment, world) if "steps: train_samples" not in n
            ] == []


@pytest.mark.parametrize(("name", "choice"), BILLIONS, ids=map("-".join, BILLIONS))
def test_full_size_example_has_published_parameter_count(
    name: str, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    conf = REPOSITORY / "examples" / name / "conf"
    experiment = load(conf, "train", [f"train={choice}", "action=dryrun"]).experiment
    argv = command_line(experiment.train)
    options = ["--num-layers-in-first-pipeline-stage", "--num-layers-in-last-pipeline-stage"]
    argv = [
        word for i, word in enumerate(argv) if word not in options and argv[i - 1] not in options
    ]
    argv += ["--expert-model-parallel-size", "1", "--pipeline-model-parallel-size", "1"]
    args = derive_arguments(parse_arguments([*argv, "--tensor-model-parallel-size", "1"]), 1)
    (stage,) = forecast_step(args, args.vocab_size).stages
    assert stage.memory.weights / 2 == round(BILLIONS[name, choice] * 1e9)


@pytest.mark.parametrize("world", [8, 16])
def test_fine_tuning_example_is_valid(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The 8B example loads; the tiny one is run together with its guide."""
    monkeypatch.chdir(REPOSITORY)
    conf = REPOSITORY / "examples" / "qwen3" / "conf"
    experiment = load(conf, "train", ["train=8b", "action=dryrun"]).experiment
    parsed = parse_arguments(command_line(experiment.train))
    assert (parsed.sft, parsed.peft_type, parsed.qk_layernorm) == (True, "lora", True)
    assert parsed.valid_data_path[1] == str(REPOSITORY / "data" / "code_valid.jsonl")
    assert check_world(experiment, world) == []
    assert experiment_notes(experiment, world) == []


@pytest.mark.parametrize("world", [8, 16])
def test_preference_example_is_valid(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    conf = REPOSITORY / "examples" / "qwen3" / "conf"
    experiment = load(conf, "train", ["train=8b_dpo", "action=dryrun"]).experiment
    parsed = parse_arguments(command_line(experiment.train))
    assert (parsed.dpo, parsed.dpo_beta, parsed.peft_type) == (True, 0.1, "lora")
    assert parsed.train_data_path == [str(REPOSITORY / "data" / "pairs.jsonl")]
    assert check_world(experiment, world) == []
    assert experiment_notes(experiment, world) == []


@pytest.mark.parametrize("world", [1, 8])
def test_bert_example_is_valid(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    conf = REPOSITORY / "examples" / "bert" / "conf"
    assert [path.stem for path in (conf / "train").glob("*.yaml")] == ["tiny"]
    experiment = load(conf, "train", ["action=dryrun"]).experiment
    parsed = parse_arguments(command_line(experiment.train))
    assert (parsed.family, parsed.mask_prob) == ("bert", 0.15)
    assert check_world(experiment, world) == []
    assert experiment_notes(experiment, world) == []


def test_edits_from_the_guide_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    (tmp_path / "train").mkdir()
    train = (CONF / "train.yaml").read_text(encoding="utf-8")
    for old, new in (
        ("- train: tiny", "- train: 8b"),
        ("# CUDA_VISIBLE_DEVICES: 0,1", "CUDA_VISIBLE_DEVICES: 0,1"),
    ):
        assert old in train
        train = train.replace(old, new)
    model = (CONF / "train/8b.yaml").read_text(encoding="utf-8")
    model = model.replace("train_samples: 29297664", "train_samples: 1000")
    (tmp_path / "train.yaml").write_text(train, encoding="utf-8")
    (tmp_path / "train/8b.yaml").write_text(model, encoding="utf-8")
    experiment = load(tmp_path, "train", ["action=dryrun"]).experiment
    assert (experiment.name, experiment.exp_dir.name) == ("llama3_8b", "outputs_llama3_8b")
    assert experiment.envs.common["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"
    assert (
        "0 steps" in experiment_notes(experiment, 8)[0]
        and "is not an integer" in experiment_notes(experiment, 8)[0]
    )


def test_reference_pages_are_up_to_date() -> None:
    """The pages are written by `python tools/config/reference.py`."""
    pages = {path: (REPOSITORY / path).read_text(encoding="utf-8") for path in render()}
    assert pages == render()
    files = (REPOSITORY / DIRECTORY).glob("*.md")
    assert {f"{DIRECTORY}/{file.name}" for file in files} | {INDEX} == pages.keys()


def test_every_argument_is_on_one_reference_page() -> None:
    text = "\n".join(page for path, page in render().items() if "other-names" not in path)
    rows = Counter(re.findall(r"^\| `(\w+)` \| (?:system|model|data) \|", text, re.MULTILINE))
    assert rows == Counter(arguments().keys())


def test_missing_quickstart_data_gets_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"tools/data/quickstart\.py"):
        load(CONF, "train", [])


@pytest.mark.parametrize(
    ("key", "part"),
    [
        ("train.model.num_layers", "Number of transformer layers"),
        ("--num-layers", "default: none"),
        ("norm_epsilon", "alias of layernorm_epsilon"),
        ("experiment.runner.nnodes", "`a:b` means `a`"),
        ("runner.tee", "torchrun's `--tee`"),
        ("local_addr", "An option of torchrun"),
        ("params_dtype", "Cannot be given"),
        ("standalone", "Cannot be given"),
        ("group_query_attention", "without effect"),
        ("kv_lora_rank", "Has no effect without `multi_latent_attention`"),
        ("sgd_momentum", "Has no effect without `optimizer: sgd`"),
        ("is_hybrid_model", "Not supported: models with Mamba layers"),
        ("legacy_tokenizer", "Accepted without effect"),
        ("lora_dim", "Has no effect without `peft_type: lora`"),
        ("lora_init", "Cannot be given: `peft_type: lora` trains low-rank adapters"),
        ("log_progress", "Accepted, without effect"),
        ("auto_tuner.space", "Values to which `action=auto_tune` restricts arguments"),
        ("decoder_last_pipeline_num_layers", "alias of num_layers_in_last_pipeline_stage"),
        ("action", "`stop`: end this run"),
        ("envs", "exactly as the YAML writes them"),
        ("experiment.runner", "type, backend, nnodes,"),
        ("runner", "`explain experiment.runner.KEY` describes one key"),
        ("train", "system, model, data"),
        ("train.data", "mock_data"),
    ],
)
def test_explain_describes_key(key: str, part: str) -> None:
    assert part in " ".join(explain(key).split())


def test_explain_suggests_no_name_that_only_shares_letters() -> None:
    with pytest.raises(ConfigError, match=r"nope: unknown key, and neither names nor descript"):
        explain("nope")


def test_example_name_follows_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    experiment = load(CONF, "train", ["train=8b", "action=dryrun"]).experiment
    assert (experiment.name, experiment.exp_dir) == ("llama3_8b", REPOSITORY / "outputs_llama3_8b")


def test_explain_suggests_name_for_typo() -> None:
    with pytest.raises(ConfigError, match="did you mean 'num_layers'"):
        explain("num_layres")
