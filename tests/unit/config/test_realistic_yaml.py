"""Realistic FlagScale YAMLs, from the file to the arguments of the training program."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import yaml
from support.field_experiments import EXPERIMENTS, ExperimentCase

from flagscale.config.arguments.derive import derive_arguments
from flagscale.config.arguments.spec.command_line import command_line, parse_arguments
from flagscale.config.checks import check_world, experiment_notes
from flagscale.errors import ConfigError

if TYPE_CHECKING:
    from conftest import Workspace

EXPERIMENT = """\
defaults:
  - _self_
  - train: mixture
experiment:
  exp_name: mixture
  seed: 42
  save_steps: 100
  load: null
  exp_dir: ./outputs
  ckpt_format: torch
  task:
    type: train
    backend: megatron
    entrypoint: flagscale/train/train_gpt.py
  runner:
    per_node_task: false
    no_shared_fs: false
    rdzv_backend: static
    hostfile: null
    nproc_per_node: 4
  envs:
    CUDA_DEVICE_MAX_CONNECTIONS: 1
action: run
hydra:
  run:
    dir: ${experiment.exp_dir}/hydra
"""

TRAIN = """\
system:
  no_shared_fs: ${experiment.runner.no_shared_fs}
  tensor_model_parallel_size: 1
  pipeline_model_parallel_size: 2
  decoder_first_pipeline_num_layers: 4
  expert_model_parallel_size: 2
  sequence_parallel: true
  use_flash_attn: true
  use_distributed_optimizer: true
  precision:
    bf16: true
    initial_loss_scale: 65536
    attention_softmax_in_fp32: true
    accumulate_allreduce_grads_in_fp32: true
  logging:
    wandb_project: ${experiment.exp_name}
    wandb-log-model: false
    wandb-log-model-interval: 1
  checkpoint:
    save_interval: ${experiment.save_steps}
    load: ${experiment.load}
    ckpt_format: ${experiment.ckpt_format}
model:
  transformer_impl: transformer_engine
  num_layers: 7
  hidden_size: 512
  num_attention_heads: 8
  seq_length: 128
  norm_epsilon: 1e-6
  norm_init_weight: 0.02
  use_rotary_position_embeddings: true
  no_position_embedding: true
  no_rope_fusion: false
  swiglu: true
  multiple_of: 256
  hidden_dim_multiplier: 2
  disable_bias_linear: true
  reset_position_ids: true
  reset_attention_mask: true
  num_experts: 8
  moe_layer_freq: "[0]+[1]*6"
  moe_router_topk: 2
  weight_decay: 0.1
  train_samples: 1600
  global_batch_size: 16
  seed: ${experiment.seed}
  optimizer:
    weight_decay: 0.1
    lr_scheduler:
      lr: 1.0e-3
      lr_decay_style: WSD
      lr_wsd_decay_samples: 160
data:
  mock_data: true
  no_mmap_bin_files: true
  tokenizer:
    tokenizer_type: NullTokenizer
    vocab_size: 1000
"""

NOTES = (
    "train.model.transformer_impl: 'auto' is used instead of 'transformer_engine'",
    "train.system.checkpoint.ckpt_format: 'torch_dist' is used instead of 'torch'",
    "train.system.sequence_parallel: false is used instead of true",
    "initial_loss_scale has no effect: requires fp16",
    "wandb_log_model_interval has no effect: this metric, trace or check",
    "train.system.checkpoint.load: null: every start begins at step 0",
    "100 steps: train_samples 1600",
)


def test_realistic_yaml_gives_expected_arguments(workspace: Workspace) -> None:
    workspace.write("conf/train.yaml", EXPERIMENT)
    workspace.write("conf/train/mixture.yaml", TRAIN)
    experiment = workspace.load()
    assert check_world(experiment, 4) == []
    notes = experiment_notes(experiment, 4)
    assert [note for note in NOTES if not any(text.startswith(note) for text in notes)] == []
    assert len(notes) == len(NOTES)
    args = derive_arguments(parse_arguments(command_line(experiment.train)), 4)
    assert (args.ckpt_format, args.transformer_impl) == ("torch_dist", "auto")
    assert (args.sequence_parallel, args.reset_attention_mask) == (False, True)
    assert (args.moe_layer_freq, args.ffn_hidden_size) == ([0, *[1] * 6], 2816)
    assert (args.num_layers_in_first_pipeline_stage, args.seed, args.load) == (4, 42, None)
    assert (args.mmap_bin_files, args.norm_init_weight) == (False, 0.02)
    assert args.apply_rope_fusion
    assert len(args.remarks) == 4


def test_override_of_unsupported_argument_gives_reason(workspace: Workspace) -> None:
    with pytest.raises(ConfigError, match=r"lora_seed: cannot be given: `peft_type: lora` trains"):
        workspace.load("train.model.lora_seed=8")


def _write_experiment(workspace: Workspace, case: ExperimentCase) -> None:
    """Write the files of an experiment, including those at its placeholder paths."""
    for name in ("data/vocab.json", "data/merges.txt", "data/special.txt"):
        workspace.write(name, "{}\n")
    for program in {
        other_case.program
        for other_case in EXPERIMENTS.values()
        if "checkout" in other_case.program
    }:
        workspace.write(program, "")
    experiment = {
        "exp_name": "field",
        "exp_dir": "outputs",
        "seed": 42,
        "save_steps": 100,
        "load": None,
        "ckpt_format": "torch",
        "task": {"type": "train", "backend": case.backend, "entrypoint": case.program},
        "runner": {"nnodes": 1, "nproc_per_node": 8, "no_shared_fs": False, **(case.runner or {})},
    }
    if case.auto_tuner is not None:
        experiment["auto_tuner"] = case.auto_tuner
    train = {key: value for key, value in case.train.items() if value is not None}
    content = {"experiment": experiment, "train": {"model": train}}
    workspace.write("conf/train.yaml", yaml.safe_dump(content, sort_keys=False))


@pytest.mark.parametrize("case", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_flagscale_experiment_is_planned_or_rejected_with_reason(
    workspace: Workspace, case: ExperimentCase
) -> None:
    _write_experiment(workspace, case)
    if not case.expected_errors:
        experiment = workspace.load("action=dryrun")
        assert check_world(experiment, case.ranks) == []
        assert not any("unknown" in note for note in experiment_notes(experiment, case.ranks))
        return
    with pytest.raises(ConfigError) as raised:
        workspace.load("action=dryrun")
    problems = [str(problem) for problem in raised.value.problems]
    assert [
        part for part in case.expected_errors if not any(part in text for text in problems)
    ] == []
    assert len(problems) == len(case.expected_errors)


def test_section_auto_tuner_is_read(workspace: Workspace) -> None:
    _write_experiment(workspace, EXPERIMENTS["aquila-tuner"])
    tuner = workspace.load("action=auto_tune").tuner
    assert tuner.space == {"tensor_model_parallel_size": (1, 2, 4, 8)}
    assert tuner.control.max_time == 9


MULTIMODAL = ("llava1.5", "llava-onevision", "qwen2.5-vl", "pi0", "robotics")


@pytest.mark.parametrize("name", MULTIMODAL)
def test_keys_of_other_programs_are_not_unknown(workspace: Workspace, name: str) -> None:
    case = EXPERIMENTS[name]._replace(program="flagscale/train/train_gpt.py", backend="megatron")
    _write_experiment(workspace, case)
    with pytest.raises(ConfigError) as raised:
        workspace.load("action=dryrun")
    assert "unknown argument" not in str(raised.value)
