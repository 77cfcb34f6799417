"""Rejected arguments of data sets, blends, phases and data loaders."""

from __future__ import annotations

from typing import Any

import pytest
from unit.config.check_helpers import CHAT_DATA, PAIR_DATA, Problems, list_problems

PROBLEMS: Problems = {
    "documents-and-a-window": (
        {"reset_attention_mask": True, "attention_backend": "local", "window_size": [4, 0]},
        "window_size",
        "reset_attention_mask and attention_backend: local, whose window",
    ),
    "documents-by-cudnn": (
        {"reset_attention_mask": True, "attention_backend": "fused"},
        "attention_backend",
        "fused is not supported with reset_attention_mask: the cuDNN kernel cannot separate",
    ),
    "validations": (
        {"multiple_validation_sets": True},
        "multiple_validation_sets",
        "valid_data_path with one prefix per validation set",
    ),
    "weights-of-validations": (
        {
            "multiple_validation_sets": True,
            "mock_data": False,
            "train_data_path": "a",
            "valid_data_path": "0.3 a 0.7 b",
        },
        "valid_data_path",
        "multiple_validation_sets, because each set is evaluated",
    ),
    "early-stopping-without-evaluations": (
        {"early_stopping_patience": 3, "eval_iters": 0},
        "early_stopping_patience",
        "requires evaluations, which eval_iters: 0 disables",
    ),
    "best-checkpoint-without-evaluations": (
        {"save_best": True, "eval_iters": 0},
        "save_best",
        "requires evaluations, which eval_iters: 0 disables",
    ),
    "conversations-as-text": (
        {"data_path": "a.jsonl", "mock_data": False},
        "data_path",
        "a.jsonl: to train on its conversations set sft: true; to train on its pairs of",
    ),
    **{
        f"conversations-{name}": ({**CHAT_DATA, **values}, key, message)
        for name, (values, key, message) in {
            "of-an-index": (
                {"data_path": "a/b"},
                "data_path",
                "sft requires conversation files (.jsonl, .ndjson, .json, .parquet), found a/b",
            ),
            "weighed": ({"data_path": "1 a.jsonl 2 b.jsonl"}, "data_path", "leave the weights out"),
            "without-template": (
                {"tokenizer_type": "NullTokenizer"},
                "tokenizer_type",
                "NullTokenizer is not supported with sft: it has no chat template; use Hugging",
            ),
            "template": (
                {"chat_template": "chatlm"},
                "chat_template",
                "expected chatml or llama3 or a .jinja file, found 'chatlm'",
            ),
            "by-cudnn": (
                {"attention_backend": "fused"},
                "attention_backend",
                "cannot separate conversations",
            ),
            "of-bert": ({"family": "bert"}, "sft", "answers are not predicted token by token"),
        }.items()
    },
    **{
        f"pairs-{name}": ({**PAIR_DATA, **values}, key, message)
        for name, (values, key, message) in {
            "of-an-index": (
                {"data_path": "a/b"},
                "data_path",
                "dpo requires files of pairs (.jsonl, .ndjson, .json, .parquet), found a/b",
            ),
            "and-conversations": ({"sft": True}, "sft", "cannot be combined with dpo"),
            "without-model": (
                {"pretrained_checkpoint": None},
                "pretrained_checkpoint",
                "is required by dpo: the model to start from, which is also the reference",
            ),
            "smoothed-ipo": (
                {"dpo_loss": "ipo", "dpo_label_smoothing": 0.1},
                "dpo_label_smoothing",
                "is not supported with dpo_loss: ipo; leave it out",
            ),
            "of-experts": (
                {"num_moe_experts": 4, "moe_aux_loss_coeff": 0.01},
                "moe_aux_loss_coeff",
                "have different numbers of pairs; set moe_aux_loss_coeff: 0 or sft_packing: false",
            ),
            "of-bert": ({"family": "bert"}, "dpo", "answers are not predicted token by token"),
        }.items()
    },
    "prompts-without-evaluation": (
        {"eval_prompts": "/x", "eval_iters": 0, "eval_prompt_tokens": 4},
        "eval_prompts",
        "requires evaluations, which eval_iters: 0 disables",
    ),
    "tasks-without-tokenizer": (
        {"eval_tasks": ["arc_easy"]},
        "eval_tasks",
        "requires a tokenizer; set tokenizer_type and tokenizer_path",
    ),
    "tasks-of-bert": (
        {"eval_tasks": ["arc_easy"], "tokenizer_type": "ByteLevelTokenizer", "family": "bert"},
        "eval_tasks",
        "text is not predicted token by token",
    ),
    "metric-without-tasks": (
        {"best_metric": "arc_easy/acc"},
        "best_metric",
        "names a metric of eval_tasks, which is not set",
    ),
    "prompts-without-room": (
        {"eval_prompts": "/x"},
        "eval_prompt_tokens",
        "less than seq_length 32, found 32",
    ),
    "no-length": ({"train_iters": None}, "train_iters", "found neither"),
    "two-lengths": ({"train_samples": 4}, "train_samples", "found both"),
    **{
        f"schedule-{name}": (values, key, message)
        for name, (values, key, message) in {
            "warm-up-twice": (
                {"lr_warmup_iters": 8, "lr_warmup_samples": 4},
                "lr_warmup_iters",
                "cannot be combined with lr_warmup_samples; leave one out",
            ),
            "decay-twice": (
                {"lr_decay_iters": 8, "lr_decay_samples": 4},
                "lr_decay_iters",
                "lr_decay_samples; leave one",
            ),
            "last-phase-twice": (
                {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 8, "lr_wsd_decay_samples": 4},
                "lr_wsd_decay_iters",
                "lr_wsd_decay_samples; leave one",
            ),
            "last-phase": (
                {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 11},
                "lr_wsd_decay_iters",
                "final phase of 11 steps does not fit in the decay of 10 steps",
            ),
            "last-phase-in-samples": (
                {"lr_decay_style": "WSD", "lr_wsd_decay_samples": 44, "global_batch_size": 4},
                "lr_wsd_decay_samples",
                "11 steps does not fit in the decay of 10",
            ),
            "last-phase-and-warm-up": (
                {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 9, "lr_warmup_fraction": 0.2},
                "lr_wsd_decay_iters",
                "9 steps does not fit in the decay of 10 steps after a warm-up of 2",
            ),
            "no-last-phase": (
                {"lr_decay_style": "WSD"},
                "lr_wsd_decay_iters",
                "is required by lr_decay_style: WSD",
            ),
            "weight-decay": (
                {"weight_decay_incr_style": "linear"},
                "weight_decay_incr_style",
                "linear requires start_weight_decay or end_weight_decay",
            ),
        }.items()
    },
    "split": ({"split": "50;50"}, "split", "such as 969,30,1, found '50;50'"),
    "split-of-four": ({"split": "1,1,1,1"}, "split", "up to three numbers"),
    "split-of-nothing": ({"split": "0,0,0"}, "split", "up to three numbers"),
    "no-data": ({"mock_data": None}, "data_path", "mock_data: true"),
    "blend-two-weights": (
        {"mock_data": None, "data_path": ["1", "2", "a"]},
        "data_path",
        "prefix after the weight 1, found '2'",
    ),
    "blend-some-weights": (
        {"mock_data": None, "data_path": ["0.3", "a", "b"]},
        "data_path",
        "b has no",
    ),
    "blend-at-end": (
        {"mock_data": None, "train_data_path": ["b"], "valid_data_path": ["a", "0.5"]},
        "valid_data_path",
        "after the weight 0.5, found the end",
    ),
    "blend-negative": (
        {"mock_data": None, "data_path": ["-0.5", "a", "1", "b"]},
        "data_path",
        "positive weight, found -0.5",
    ),
    "blend-zero": (
        {"mock_data": None, "train_data_path": ["0", "a"]},
        "train_data_path",
        "a positive weight, found 0",
    ),
    **{
        f"phases-{name}": (
            {"mock_data": None, "data_path": ["a"], "data_phases": phases, **more},
            key,
            message,
        )
        for name, (phases, more, key, message) in {
            "none": (["100 a"], {}, "data_phases", "expected {samples: 100000"),
            "back": (
                ["samples=9 a", "tokens=9 a"],
                {},
                "data_phases",
                "found first samples [9, 1]",
            ),
            "weights": (
                ["samples=9 0.3 a b"],
                {},
                "data_phases",
                "for all data sets or for none; b has none",
            ),
            "bare": (
                ["samples=9 a b"],
                {},
                "data_phases",
                "expected a weight for each data set; a has none",
            ),
            "shuffled": (
                ["samples=9 a"],
                {"dataloader_type": "cyclic"},
                "dataloader_type",
                "cyclic is not supported with data_phases: it shuffles samples",
            ),
            "alone": (
                ["samples=9 a"],
                {"mock_data": True, "data_path": None},
                "data_phases",
                "requires data_path or train_data_path",
            ),
            "talks": (
                ["samples=9 a.jsonl"],
                {"sft": True, "data_path": ["a.jsonl"]},
                "data_phases",
                "is not supported with sft: conversations are reshuffled",
            ),
        }.items()
    },
    **{
        f"external-{name}": (
            {"mock_data": None, "dataloader_type": "external", "external_data": "a.b:f", **values},
            key,
            message,
        )
        for name, (values, key, message) in {
            "nothing": ({"external_data": None}, "external_data", "is required by"),
            "form": ({"external_data": "a b:f"}, "external_data", "found 'a b:f'"),
            "no-function": ({"external_data": "a.py"}, "external_data", "file.py:function, found"),
            "data-too": ({"data_path": ["a"]}, "data_path", "external_data; leave one out"),
            "mock-too": ({"mock_data": True}, "mock_data", "external_data; leave one out"),
            "phases": (
                {"data_phases": ["samples=9 1 a"]},
                "data_phases",
                "requires data_path or train_data_path",
            ),
        }.items()
    },
    "blend-empty": (
        {"mock_data": None, "data_path": []},
        "data_path",
        "data set, found an empty list",
    ),
    "mock-and-data": ({"data_path": ["a"]}, "mock_data", "cannot be combined with data_path"),
}


NOT_WITH_PAIRS = {
    "cuda_graph_impl": ("local", "is not supported with dpo"),
    "mtp_num_layers": (1, "is not supported with dpo, which has no loss of single tokens"),
    "enable_hetero": (True, "is not supported with dpo"),
}


@pytest.mark.parametrize("name", NOT_WITH_PAIRS)
def test_argument_is_rejected_with_pairs(name: str) -> None:
    value, message = NOT_WITH_PAIRS[name]
    problems = list_problems({**PAIR_DATA, name: value})
    assert any(key == name and text.startswith(message) for key, text in problems)


@pytest.mark.parametrize(("values", "name", "message"), PROBLEMS.values(), ids=PROBLEMS)
def test_invalid_data_argument_is_rejected(values: dict[str, Any], name: str, message: str) -> None:
    ((argument, text),) = list_problems(values)
    assert message in text
    assert argument == name or name not in values
