"""`flagscale explain WORDS` finds what a person means."""

from __future__ import annotations

import sys
from subprocess import run

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.config.arguments.spec.registry import arguments
from flagscale.config.explain import experiment_entries, explain
from flagscale.config.key_search import SYNONYMS, SearchEntry, search_keys
from flagscale.errors import ConfigError

FOUND: dict[str, tuple[str, ...]] = {
    "freeze": ("train.model.freeze_parameters", "train.model.trainable_parameters"),
    "freezing": ("train.model.freeze_parameters",),
    "how to freeze layers": ("train.model.freeze_parameters",),
    "early stopping": ("train.model.early_stopping_patience",),
    "learning rate": ("train.model.lr", "train.model.min_lr", "train.model.lr_decay_style"),
    "the learning rates": ("train.model.lr",),
    "batch size": ("train.model.micro_batch_size", "train.model.global_batch_size"),
    "gradient accumulation": ("train.model.global_batch_size",),
    "number of gpus": ("experiment.runner.nproc_per_node",),
    "gpus": ("experiment.runner.nproc_per_node", "train.system.device"),
    "checkpoint": ("train.system.save", "train.system.load"),
    "dropout": ("train.model.hidden_dropout", "train.model.attention_dropout"),
    "environment variables": ("experiment.envs",),
    "out of memory": ("train.system.recompute_granularity",),
    "weights and biases": ("train.system.wandb_project",),
    "train length": ("train.model.train_iters",),
    "mixed precision": ("train.system.bf16", "train.system.fp16"),
    "save every": ("train.system.save_interval",),
    "saving checkpoints every 100 steps": ("train.system.save_interval",),
    "checkpoint interval": ("train.system.save_interval",),
    "stop early": ("train.model.early_stopping_patience",),
    "gpu memory": ("train.system.recompute_granularity", "train.model.use_distributed_optimizer"),
    "wandb": ("train.system.wandb_project",),
    "sequence length": ("train.model.seq_length",),
    "data": ("train.data.data_path",),
    "validation split": ("train.data.split", "train.data.valid_data_path"),
    "clipping": ("train.model.clip_grad",),
    "train longer": ("train.model.train_iters",),
}


@pytest.mark.parametrize(("query", "keys"), FOUND.items(), ids=FOUND)
def test_words_find_the_keys_that_are_meant(query: str, keys: tuple[str, ...]) -> None:
    lines = explain(query).splitlines()
    assert lines[0] == f"no key is called {query!r}; keys that match:"
    assert tuple(line.split()[0] for line in lines[1 : 1 + len(keys)]) == keys


def test_section_is_described_after_the_keys_that_are_meant() -> None:
    assert "\n\ntrain.data\n  a section; " in explain("data")


def test_resuming_is_answered_with_what_happens() -> None:
    assert "a run resumes from its newest checkpoint by default" in explain("resume")


@pytest.mark.parametrize(
    ("query", "key"),
    [
        ("epochs", "train.model.train_samples  (--train-samples)"),
        ("learning_rate", "train.model.lr  (--lr)"),
        ("max_steps", "train.model.train_iters  (--train-iters)"),
        ("--nproc", "experiment.runner.nproc_per_node"),
        ("gradient_checkpointing", "train.system.recompute_granularity  (--recompute-granularity)"),
    ],
)
def test_name_of_another_trainer_is_answered_with_the_key(query: str, key: str) -> None:
    name, answer, *rest = explain(query).splitlines()
    assert name == query.strip("-")
    assert answer.startswith("  is a name of ")
    assert key in rest


@pytest.mark.parametrize("query", ["qwertz", "the", "x y z", "?"])
def test_letters_alone_find_nothing(query: str) -> None:
    with pytest.raises(ConfigError, match="unknown key, and neither names nor descriptions"):
        explain(query)


def test_supported_keys_come_first() -> None:
    entries = [
        SearchEntry("train.model.window", "Not supported", supported=False),
        SearchEntry("train.model.span", "Size of the window"),
    ]
    assert [entry.key for entry in search_keys("windows", entries)] == [
        "train.model.span",
        "train.model.window",
    ]


def test_synonyms_are_keys() -> None:
    keys = {entry.key for entry in experiment_entries()} | {*arguments()}
    sections = {key.rpartition(".")[0] for key in keys}
    names = {name for names in SYNONYMS.values() for name in names}
    assert names - keys - sections == set()


@given(st.text(max_size=30))
def test_any_query_has_an_answer_or_an_error(query: str) -> None:
    try:
        assert explain(query)
    except ConfigError as error:
        assert "unknown key" in str(error)


def test_words_need_no_quotes() -> None:
    command = [sys.executable, "-m", "flagscale.cli", "explain", "learning", "rate"]
    result = run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0
    assert result.stdout.splitlines()[1].startswith("  train.model.lr ")
