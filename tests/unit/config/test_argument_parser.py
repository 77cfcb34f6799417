"""Parser of the training program's command line."""

from __future__ import annotations

from typing import Any

import pytest
from support.arguments import resolve_argument

from flagscale.config.arguments.spec.command_line import parse_arguments
from flagscale.errors import ConfigError


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        ("--num-layers 4", "num_layers", 4),
        ("--num-layers=4", "num_layers", 4),
        ("--num_layers 4", "num_layers", 4),
        ("--num-layers 2 --num-layers 4", "num_layers", 4),
        ("--lr 3e-4", "lr", 3e-4),
        ("--bf16", "bf16", True),
        ("--bf16 false", "bf16", False),
        ("--no-gradient-reduce-div-fusion", "gradient_reduce_div_fusion", False),
        ("--disable-bias-linear", "add_bias_linear", False),
        ("--norm-epsilon 1e-6", "layernorm_epsilon", 1e-6),
        ("--use-flash-attn", "attention_backend", "flash"),
        ("--no-overlap-p2p-communication", "overlap_p2p_comm", False),
        ("--accumulate-allreduce-grads-in-fp32", "grad_reduce_in_fp32", True),
        ("--num-experts 8", "num_moe_experts", 8),
        ("--tokenizer-model /x", "tokenizer_path", "/x"),
        ("--data-path 0.3 a 0.7 b", "data_path", ["0.3", "a", "0.7", "b"]),
        ("--moe-layer-freq 2", "moe_layer_freq", 2),
        ("--moe-layer-freq 1 0 1", "moe_layer_freq", [1, 0, 1]),
        ("--moe-layer-freq [0]+[1]*3", "moe_layer_freq", [0, 1, 1, 1]),
        ("--moe-layer-freq ([0,1]+2*[1])*2", "moe_layer_freq", [0, 1, 1, 1, 0, 1, 1, 1]),
        ("--window-size 127,0", "window_size", [127, 0]),
        ("--window-size (127,0)", "window_size", [127, 0]),
        ("--moe-layer-freq 0,1", "moe_layer_freq", [0, 1]),
        ("--moe-aux-loss-coeff [0.1,2e-2]", "moe_aux_loss_coeff", [0.1, 0.02]),
        ("--moe-layer-freq [1]", "moe_layer_freq", [1]),
        ("--decoder-first-pipeline-num-layers 3", "num_layers_in_first_pipeline_stage", 3),
        ("--decoder-last-pipeline-num-layers 3", "num_layers_in_last_pipeline_stage", 3),
        ("--no-load-optim", "no_load_optim", True),
        ("--recompute-activations", "recompute_granularity", "selective"),
        ("", "num_layers", None),
    ],
)
def test_argument_value_is_parsed(argv: str, name: str, value: Any) -> None:
    assert vars(parse_arguments(argv.split()))[name] == value


def test_aliases_add_no_attribute() -> None:
    parsed = parse_arguments(["--norm-epsilon", "1e-6", "--group-query-attention"])
    assert not hasattr(parsed, "norm_epsilon")
    assert not hasattr(parsed, "group_query_attention")


def test_default_lists_are_copied() -> None:
    parse_arguments([]).offload_modules.append("x")
    assert parse_arguments([]).offload_modules == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--num-layres 4", r"--num-layres: unknown argument; did you mean 'num_layers'"),
        ("--num-layers x", r"--num-layers: expected a whole number not less than 1, found 'x'"),
        ("--num-layers", "found nothing"),
        ("--num-layers 1 2", "found '1' '2'"),
        ("--num-layers 0", "not less than 1"),
        ("--num-layers 2.5", "whole number"),
        ("--hidden-dropout 2", "from 0 to 1"),
        ("--lr nan", "expected a number"),
        ("--lr 1e400", "expected a number"),
        ("--clip-grad=-inf", "expected a number"),
        ("--normalization BatchNorm", "one of LayerNorm, RMSNorm"),
        ("--bf16 maybe", "true or false"),
        ("--norm-epsilon 1e-5 --layernorm-epsilon 1e-6", "contradicts --norm-epsilon"),
        ("--params-dtype bf16", "follows from `bf16`"),
        ("--no-num-layers", "unknown argument"),
        ("--lr-decay-style stablelm2-scheduler", "most similar schedule is WSD"),
        ("--tokenizer-type TikTokenizer", r"convert the tokenizer to tokenizer\.json"),
        ("--tokenizer-type HuggingfaceTokenizer", "did you mean 'HuggingFaceTokenizer'"),
        (
            "--lora-in-init-method zero",
            "both matrices initialized to zero, adapters would never change",
        ),
        (
            "--lora-out-init-method normal",
            "initialized to zero, so that training starts from the base model",
        ),
        ("--lora-seed 8", "--lora-seed: is not supported: `peft_type: lora`"),
        ("--log-progress", "--log-progress: is not supported: this metric, trace or check"),
        ("--moe-layer-freq [0]+1", r"or \[0\]\+\[1\]\*3 for \[0, 1, 1, 1\], found"),
        ("--moe-layer-freq [1]*[1]", "a whole number"),
        ("--moe-layer-freq [1]-[1]", "a whole number"),
        ("--moe-layer-freq [1]*9**9", "a whole number"),
        ("--moe-layer-freq [1]*99999999999", "a whole number"),
        ("--moe-layer-freq [[1]]", "a whole number"),
        ("--moe-layer-freq [x]", "a whole number"),
        ("--window-size 127,", "a whole number, found"),
        ("--window-size (127,0", "a whole number"),
        ("--window-size 127,0.5", "a whole number, found"),
        ("--moe-router-load-balancing-type foo", "aux_loss, seq_aux_loss, global_aux_loss, sink"),
        ("--recompute-modules core_attn bogus", "one of core_attn, mlp, moe, shared_experts"),
        ("--moe-layer-freq [True]", "a whole number"),
        ("--moe-layer-freq [1", "a whole number"),
        ("train.py", "expected a flag"),
    ],
)
def test_invalid_argument_is_rejected(argv: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        parse_arguments(argv.split())
    assert error.value.exit_code == 2


def test_all_errors_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        parse_arguments(["--nmu", "1", "--num-layers", "x", "--lr=1", "--hidden-size", "-3"])
    assert [p.key for p in error.value.problems] == ["--nmu", "--num-layers", "--hidden-size"]


def test_help_lists_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_arguments(["--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0
    assert "--tensor-model-parallel-size" in text
    assert "--distributed-backend" in text


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("num_layers", "4", ("num_layers", 4)),
        ("split", 1, ("split", "1")),
        ("disable_bias_linear", True, ("add_bias_linear", False)),
        ("use_flash_attn", False, None),
        ("group_query_attention", True, None),
        ("no_rope_fusion", True, ("apply_rope_fusion", False)),
        ("data_path", "a b", ("data_path", ["a b"])),
        ("moe_layer_freq", 2, ("moe_layer_freq", 2)),
        ("moe_layer_freq", [2], ("moe_layer_freq", [2])),
        ("window_size", "127 0", ("window_size", [127, 0])),
        ("window_size", ["127,0"], ("window_size", [127, 0])),
        ("moe_layer_freq", "(0, 1)", ("moe_layer_freq", [0, 1])),
        ("rampup_batch_size", "2 2 100", ("rampup_batch_size", [2, 2, 100])),
        ("log_progress", True, None),
        ("enable_straggler_detection", True, ("log_straggler", True)),
        ("use_dualpipev", False, None),
    ],
)
def test_alias_is_converted_to_canonical_argument(
    name: str, value: Any, expected: tuple[str, Any] | None
) -> None:
    assert resolve_argument(name, value) == expected
