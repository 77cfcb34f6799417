"""Rejected arguments of data sets, blends, phases and data loaders."""

from __future__ import annotations

from typing import Any

import pytest
from unit.config.check_helpers import CHAT_DATA, Problems, list_problems

PROBLEMS: Problems = {
    "documents-and-a-window": (
        {"reset_attention_mask": True, "attention_backend": "local", "window_size": [4, 0]},
        "window_size",
        "[4, 0] with reset_attention_mask: megatron.core's own attention makes",
    ),
    "documents-by-cudnn": (
        {"reset_attention_mask": True, "attention_backend": "fused"},
        "attention_backend",
        "fused: cuDNN's kernel takes no documents",
    ),
    "validations": (
        {"multiple_validation_sets": True},
        "multiple_validation_sets",
        "true needs valid_data_path, which names the sets",
    ),
    "weights-of-validations": (
        {
            "multiple_validation_sets": True,
            "mock_data": False,
            "train_data_path": "a",
            "valid_data_path": "0.3 a 0.7 b",
        },
        "valid_data_path",
        "a blend's weights with multiple_validation_sets",
    ),
    "conversations-as-text": (
        {"data_path": "a.jsonl", "mock_data": False},
        "data_path",
        "a.jsonl: sft: true trains on conversations; text of JSON lines is made",
    ),
    **{
        f"conversations-{name}": ({**CHAT_DATA, **values}, key, message)
        for name, (values, key, message) in {
            "of-an-index": ({"data_path": "a/b"}, "data_path", "a/b: with sft expected files of"),
            "weighed": ({"data_path": "1 a.jsonl 2 b.jsonl"}, "data_path", "leave the weights out"),
            "without-template": (
                {"tokenizer_type": "NullTokenizer"},
                "tokenizer_type",
                "NullTokenizer with sft: it has no chat template; take HuggingFaceTokenizer",
            ),
            "template": (
                {"chat_template": "chatlm"},
                "chat_template",
                "expected chatml or llama3 or a .jinja file, found 'chatlm'",
            ),
            "by-cudnn": ({"attention_backend": "fused"}, "attention_backend", "takes no documents"),
            "of-bert": ({"family": "bert"}, "sft", "answers are not predicted token by token"),
        }.items()
    },
    "prompts-without-evaluation": (
        {"eval_prompts": "/x", "eval_iters": 0, "eval_prompt_tokens": 4},
        "eval_prompts",
        "prompts are answered at evaluations, which eval_iters: 0 switches off",
    ),
    "prompts-in-parts": (
        {"eval_prompts": "/x", "context_parallel_size": 2, "eval_prompt_tokens": 4},
        "eval_prompts",
        "prompts are not answered with context parallelism or unlike devices",
    ),
    "prompts-without-room": (
        {"eval_prompts": "/x"},
        "eval_prompt_tokens",
        "leaves no room in seq_length 32",
    ),
    "no-length": ({"train_iters": None}, "train_iters", "found neither"),
    "two-lengths": ({"train_samples": 4}, "train_samples", "found both"),
    **{
        f"schedule-{name}": (values, key, message)
        for name, (values, key, message) in {
            "warm-up-twice": (
                {"lr_warmup_iters": 8, "lr_warmup_samples": 4},
                "lr_warmup_iters",
                "8 beside lr_warmup_samples 4: give the length in steps or in samples",
            ),
            "decay-twice": (
                {"lr_decay_iters": 8, "lr_decay_samples": 4},
                "lr_decay_iters",
                "8 beside lr_decay_samples 4",
            ),
            "last-phase-twice": (
                {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 8, "lr_wsd_decay_samples": 4},
                "lr_wsd_decay_iters",
                "8 beside lr_wsd_decay_samples 4",
            ),
            "last-phase": (
                {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 11},
                "lr_wsd_decay_iters",
                "11 steps exceed 10 of the decay: the rate would jump below lr",
            ),
            "last-phase-in-samples": (
                {"lr_decay_style": "WSD", "lr_wsd_decay_samples": 44, "global_batch_size": 4},
                "lr_wsd_decay_samples",
                "11 steps exceed 10 of the decay",
            ),
            "last-phase-and-warm-up": (
                {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 9, "lr_warmup_fraction": 0.2},
                "lr_wsd_decay_iters",
                "9 steps exceed 10 of the decay less 2 of warm-up",
            ),
            "no-last-phase": ({"lr_decay_style": "WSD"}, "lr_wsd_decay_iters", "WSD needs it"),
            "weight-decay": (
                {"weight_decay_incr_style": "linear"},
                "weight_decay_incr_style",
                "linear leads from start_weight_decay to end_weight_decay: give one or both",
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
        "two weights in a row before '2'",
    ),
    "blend-some-weights": (
        {"mock_data": None, "data_path": ["0.3", "a", "b"]},
        "data_path",
        "b has no",
    ),
    "blend-at-end": (
        {"mock_data": None, "train_data_path": ["b"], "valid_data_path": ["a", "0.5"]},
        "valid_data_path",
        "0.5 at the end",
    ),
    "blend-negative": (
        {"mock_data": None, "data_path": ["-0.5", "a", "1", "b"]},
        "data_path",
        "-0.5 is not a pos",
    ),
    "blend-zero": (
        {"mock_data": None, "train_data_path": ["0", "a"]},
        "train_data_path",
        "weight 0 is not",
    ),
    **{
        f"phases-{name}": (
            {"mock_data": None, "data_path": ["a"], "data_phases": phases, **more},
            key,
            message,
        )
        for name, (phases, more, key, message) in {
            "none": (["100 a"], {}, "data_phases", "expected {samples: 100000"),
            "back": (["samples=9 a", "tokens=9 a"], {}, "data_phases", "found [9, 1] samples"),
            "weights": (["samples=9 0.3 a b"], {}, "data_phases", "b has no weight"),
            "bare": (["samples=9 a b"], {}, "data_phases", "such as a: expected a weight for each"),
            "shuffled": (
                ["samples=9 a"],
                {"dataloader_type": "cyclic"},
                "dataloader_type",
                "cyclic shuffles all samples",
            ),
            "alone": (
                ["samples=9 a"],
                {"mock_data": True, "data_path": None},
                "data_phases",
                "needs data_path or train_data_path",
            ),
            "talks": (
                ["samples=9 a.jsonl"],
                {"sft": True, "data_path": ["a.jsonl"]},
                "data_phases",
                "is for text",
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
            "data-too": ({"data_path": ["a"]}, "data_path", "the data is external_data's"),
            "mock-too": ({"mock_data": True}, "mock_data", "the data is external_data's"),
            "phases": (
                {"data_phases": ["samples=9 1 a"]},
                "data_phases",
                "needs data_path",
            ),
        }.items()
    },
    "blend-empty": ({"mock_data": None, "data_path": []}, "data_path", "is empty"),
    "mock-and-data": ({"data_path": ["a"]}, "mock_data", "makes data up, but data_path is set"),
}


@pytest.mark.parametrize(("values", "name", "message"), PROBLEMS.values(), ids=PROBLEMS)
def test_invalid_data_argument_is_rejected(values: dict[str, Any], name: str, message: str) -> None:
    ((argument, text),) = list_problems(values)
    assert message in text
    assert argument == name or name not in values
