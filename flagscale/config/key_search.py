"""Search for keys by the words that a person uses: names, other names, synonyms, descriptions."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

from flagscale.config.arguments.compat.trainer_names import TRAINER_NAMES
from flagscale.config.arguments.spec.registry import aliases

_MAX_MATCHES = 10
_STOP_WORDS = frozenset(
    ("a", "all", "an", "and", "are", "at", "by", "can", "do", "does", "for", "how", "i", "in", "is")
) | {"it", "my", "of", "on", "or", "per", "set", "the", "to", "use", "with"}


class SearchEntry(NamedTuple):
    """A key that can be found."""

    key: str
    doc: str
    supported: bool = True
    """False for a key that is refused or has no effect; it is listed last."""


class MatchKind(IntEnum):
    """Place of a query's words, best first."""

    NAME = 0
    ALIAS = 1
    SYNONYM = 2
    DESCRIPTION = 3


SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "accumulate gradients": ("global_batch_size", "micro_batch_size"),
    "activation checkpointing": ("recompute_granularity", "recompute_method"),
    "adamw": ("optimizer", "weight_decay"),
    "bfloat16": ("bf16",),
    "checkpoint": ("save", "load", "save_interval", "keep_last", "pretrained_checkpoint"),
    "checkpoint every": ("save_interval", "keep_last"),
    "checkpoint frequency": ("save_interval", "keep_last"),
    "checkpoint interval": ("save_interval", "keep_last"),
    "clip": ("clip_grad",),
    "context length": ("seq_length", "max_position_embeddings"),
    "data": ("data_path", "train_data_path", "valid_data_path", "split"),
    "dataset": ("data_path", "train_data_path", "valid_data_path", "split"),
    "deepspeed": ("use_distributed_optimizer",),
    "docker": ("experiment.runner.slurm.container",),
    "benchmark": ("eval_tasks", "eval_tasks_interval", "best_metric"),
    "best checkpoint": ("save_best", "best_metric", "keep_last"),
    "direct preference optimization": ("dpo", "dpo_beta", "dpo_loss"),
    "early stopping": ("early_stopping_patience", "early_stopping_min_delta", "exit_interval"),
    "environment variable": ("experiment.envs",),
    "epoch": ("train_samples", "train_iters", "dataloader_type"),
    "evaluate": ("eval_interval", "eval_iters", "valid_data_path", "eval_tasks", "skip_train"),
    "evaluate every": ("eval_interval", "eval_iters"),
    "export": ("export_huggingface", "export_peft", "export_each_checkpoint"),
    "fine tuning": ("pretrained_checkpoint", "finetune", "sft", "peft_type"),
    "finetuning": ("pretrained_checkpoint", "finetune", "sft", "peft_type"),
    "freeze": ("freeze_parameters", "trainable_parameters", "peft_type"),
    "frozen": ("freeze_parameters", "trainable_parameters", "peft_type"),
    "gpu": ("experiment.runner.nproc_per_node", "device"),
    "gpu memory": ("recompute_granularity", "use_distributed_optimizer", "micro_batch_size"),
    "gradient accumulation": ("global_batch_size", "micro_batch_size"),
    "gradient checkpointing": ("recompute_granularity", "recompute_method"),
    "half precision": ("bf16", "fp16"),
    "hang": ("experiment.runner.hang_detection_timeout", "distributed_timeout_minutes"),
    "huggingface": ("pretrained_checkpoint", "export_huggingface", "tokenizer_path"),
    "preference": ("dpo", "dpo_beta", "dpo_loss"),
    "learning rate": ("lr", "min_lr", "lr_decay_style", "lr_warmup_fraction", "lr_decay_iters"),
    "log every": ("log_interval",),
    "logging": ("log_interval", "tensorboard_dir", "wandb_project", "mlflow_experiment"),
    "mail": ("experiment.runner.notify.command", "experiment.runner.notify.webhook"),
    "memory": ("recompute_granularity", "use_distributed_optimizer", "micro_batch_size"),
    "mixed precision": ("bf16", "fp16", "fp8"),
    "node": ("experiment.runner.hostfile", "experiment.runner.nnodes"),
    "number of gpus": ("experiment.runner.nproc_per_node",),
    "oom": ("recompute_granularity", "use_distributed_optimizer", "micro_batch_size"),
    "out of memory": ("recompute_granularity", "use_distributed_optimizer", "micro_batch_size"),
    "output directory": ("experiment.exp_dir", "save"),
    "restart": ("experiment.runner.max_restarts", "load"),
    "resume": ("load", "finetune", "override_opt_param_scheduler"),
    "save every": ("save_interval", "keep_last"),
    "schedule": ("lr_decay_style", "lr_decay_iters", "lr_warmup_fraction"),
    "scheduler": ("lr_decay_style", "lr_decay_iters", "lr_warmup_fraction"),
    "shuffle": ("dataloader_type", "seed"),
    "slack": ("experiment.runner.notify.webhook",),
    "steps": ("train_iters", "train_samples"),
    "tp": ("tensor_model_parallel_size",),
    "pp": ("pipeline_model_parallel_size",),
    "cp": ("context_parallel_size",),
    "ep": ("expert_model_parallel_size",),
    "timeout": ("distributed_timeout_minutes", "experiment.runner.start_timeout"),
    "tokenizer": ("tokenizer_path", "tokenizer_type"),
    "training length": ("train_iters", "train_samples"),
    "train longer": ("train_iters", "train_samples", "override_opt_param_scheduler"),
    "validation split": ("split", "valid_data_path"),
    "validation": ("valid_data_path", "eval_interval", "eval_iters", "split"),
    "warm up": ("lr_warmup_fraction", "lr_warmup_iters"),
    "warmup": ("lr_warmup_fraction", "lr_warmup_iters"),
    "wandb": ("wandb_project", "wandb_exp_name"),
    "weights and biases": ("wandb_project", "wandb_exp_name"),
    "zero": ("use_distributed_optimizer",),
}
"""Words of users with the keys that they mean, most likely first: names of arguments, or dotted
keys of ``experiment``."""


def search_keys(query: str, entries: Iterable[SearchEntry]) -> list[SearchEntry]:
    """Return the entries that match the words of a query, best first; empty if none does.

    Every word has to match, except words such as "the". Words match by their stems ("freezing"
    matches "freeze"), never by similar letters.
    """
    words = _stems(query) - _STOP_WORDS
    if not words:
        return []
    synonyms, other_names = _synonyms(words), _other_names(words)
    ranked = []
    for position, entry in enumerate(entries):
        name = _name_of(entry)
        rank = _rank(entry, words, {name, entry.key} & other_names, synonyms)
        if rank is not None:
            ranked.append((not entry.supported, *rank, position, entry))
    return [row[-1] for row in sorted(ranked, key=lambda row: row[:-1])]


def keys_meant_by(query: str) -> list[str]:
    """Return the keys that are synonyms of the words of a query, most likely first."""
    return _synonyms(_stems(query) - _STOP_WORDS)


_TUNER = "experiment.auto_tuner."


def _name_of(entry: SearchEntry) -> str:
    """Return the name of a key by which it is found. The limits of a search have names of
    arguments, which users mean by these names.
    """
    name = entry.key.rpartition(".")[2]
    return f"auto_tuner_{name}" if entry.key.startswith(_TUNER) else name


def _rank(
    entry: SearchEntry, words: Set[str], other_names: Set[str], synonyms: Sequence[str]
) -> tuple[MatchKind, int] | None:
    """Return the kind of a match, and its order within the kind; None if the words do not match."""
    name = _name_of(entry)
    places = [synonyms.index(key) for key in (name, entry.key) if key in synonyms]
    name_words = _stems(name)
    if words == name_words:
        return MatchKind.NAME, 0
    if other_names:
        return MatchKind.ALIAS, 0
    if places:
        return MatchKind.SYNONYM, min(places)
    if words <= name_words:
        return MatchKind.DESCRIPTION, len(name_words)
    if words <= name_words | _stems(entry.doc):
        return MatchKind.DESCRIPTION, 100
    return None


def _synonyms(words: Set[str]) -> list[str]:
    """Return the keys of all synonyms whose words are in a query, those with most words first."""
    matches = [text for text in SYNONYMS if _stems(text) - _STOP_WORDS <= words]
    matches.sort(key=lambda text: -len(_stems(text) - _STOP_WORDS))
    return list(dict.fromkeys(key for text in matches for key in SYNONYMS[text]))


def _other_names(words: Set[str]) -> set[str]:
    """Return the keys of aliases and of other trainers' names that consist of a query's words."""
    names = {alias.target for alias in aliases().values() if _stems(alias.name) == words}
    for name, entry in TRAINER_NAMES.items():
        if _stems(name) == words:
            names |= set(entry.keys)
            names |= {key.rpartition(".")[2] for key in entry.keys if key.startswith("train.")}
    return names - {""}


@lru_cache(maxsize=4096)
def _stems(text: str) -> frozenset[str]:
    return frozenset(_stem(word) for word in re.findall(r"[a-z0-9]+", text.lower()))


def _stem(word: str) -> str:
    """Return a word without the usual endings: "freezing", "freezes" and "freeze" become equal."""
    word = word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
    if len(word) > 4 and (stem := re.sub(r"(ing|ed)$", "", word)) != word:
        return re.sub(r"([bdgmnprt])\1$", r"\1", stem)  # "stopping" is a form of "stop"
    return word[:-1] if len(word) > 3 and word.endswith("e") else word


def match_lines(matches: Sequence[SearchEntry]) -> Iterator[str]:
    """Yield a line for each of the best matches: its key, and the beginning of its description."""
    shown = matches[:_MAX_MATCHES]
    width = max(len(entry.key) for entry in shown)
    columns = max(shutil.get_terminal_size((100, 24)).columns - width - 4, 24)
    for entry in shown:
        yield f"  {entry.key:{width}}  {textwrap.shorten(entry.doc, columns, placeholder=' …')}"
    if len(matches) > len(shown):
        yield f"  … and {len(matches) - len(shown)} more; more words find fewer"
