"""Settings of other trainers are answered by the key of this project and its value."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.config.arguments.compat.trainer_names import TRAINER_NAMES, replacement_of
from flagscale.config.arguments.spec.argument import SettingContext
from flagscale.config.arguments.spec.registry import lookup, unknown_message
from flagscale.config.arguments.spec.values import convert
from flagscale.config.explain import experiment_entries
from flagscale.config.overrides import is_known_key
from flagscale.config.torchrun import TORCHRUN_OPTIONS
from flagscale.errors import ConfigError

if TYPE_CHECKING:
    from conftest import Workspace

BATCH = {"micro_batch_size": 2, "tensor_model_parallel_size": 2}
COMMON: dict[str, tuple[Any, str]] = {
    "output_dir": ("out", "write `experiment.exp_dir: out`"),
    "max_steps": (1000, "write `train.model.train_iters: 1000`"),
    "num_train_epochs": (3, "write `train.model.train_samples`; its value is 3 x the number of"),
    "per_device_train_batch_size": (4, "write `train.model.micro_batch_size: 4`"),
    "per_device_eval_batch_size": (4, "evaluation uses `train.model.micro_batch_size`"),
    "gradient_accumulation_steps": (8, "write `train.model.global_batch_size`; its value is"),
    "learning_rate": (2e-5, "write `train.model.lr: 2e-05`"),
    "lr_scheduler_type": ("inverse_sqrt", "`train.model.lr_decay_style: inverse-square-root`"),
    "warmup_ratio": (0.03, "write `train.model.lr_warmup_fraction: 0.03`"),
    "warmup_steps": (100, "write `train.model.lr_warmup_iters: 100`"),
    "max_grad_norm": (0.5, "write `train.model.clip_grad: 0.5`"),
    "adam_epsilon": (1e-6, "write `train.model.adam_eps: 1e-06`"),
    "optim": ("adamw_torch_fused", "write `train.model.optimizer: adam`"),
    "gradient_checkpointing": (True, "write `train.system.recompute_granularity: full`, `train"),
    "logging_steps": (10, "write `train.system.log_interval: 10`"),
    "logging_dir": ("tb", "write `train.system.tensorboard_dir: tb`"),
    "eval_strategy": ("no", "write `train.model.eval_iters: 0`"),
    "eval_steps": (50, "write `train.model.eval_interval: 50`"),
    "save_strategy": ("epoch", "write `train.system.save_interval`; in steps"),
    "save_steps": (500, "write `train.system.save_interval: 500`"),
    "save_total_limit": (2, "write `train.system.keep_last: 2`"),
    "load_best_model_at_end": (True, "write `train.system.save_best: true`; the link `best`"),
    "metric_for_best_model": ("loss", "the best checkpoint is that of the lowest validation"),
    "early_stopping_threshold": (0.01, "write `train.model.early_stopping_min_delta: 0.01`"),
    "resume_from_checkpoint": ("out/x", "write `train.system.load: out/x`"),
    "dataloader_num_workers": (4, "write `train.data.num_workers: 4`"),
    "report_to": (["wandb"], "write `train.system.wandb_project: NAME`"),
    "run_name": ("a", "write `experiment.exp_name: a`"),
    "remove_unused_columns": (False, "leave it out"),
    "group_by_length": (True, "`train.data.sft_packing` packs conversations"),
    "ddp_timeout": (1800, "write `train.system.distributed_timeout_minutes: 30`"),
    "deepspeed": ("ds.json", "`train.system.data_parallel_sharding_strategy`"),
    "push_to_hub": (True, "`train.system.export_huggingface` writes the trained model"),
    "do_eval": (False, "write `train.model.eval_iters: 0`"),
    "tf32": (True, "set NVIDIA_TF32_OVERRIDE"),
    "fsdp": ("full_shard", "`train.system.data_parallel_sharding_strategy`"),
    "data_seed": (42, "write `train.system.seed: 42`"),
    "greater_is_better": (False, "the best checkpoint is that of the lowest validation loss"),
    "torch_compile": (True, "`train.system.transformer_impl: auto` selects compiled layers"),
    # SFTConfig and ModelConfig
    "packing": (True, "write `train.data.sft_packing: true`"),
    "max_seq_length": (2048, "write `train.model.seq_length: 2048`"),
    "max_length": (2048, "write `train.model.seq_length: 2048`"),
    "assistant_only_loss": (True, "write `train.data.sft: true`"),
    "completion_only_loss": (False, "the loss of conversations covers answers only; for a loss of"),
    "chat_template_path": ("a.jinja", "write `train.data.chat_template: a.jinja`; a .jinja file"),
    "beta": (0.1, "write `train.data.dpo_beta: 0.1`"),
    "loss_type": ("ipo", "write `train.data.dpo_loss: ipo`"),
    "label_smoothing": (0.2, "write `train.data.dpo_label_smoothing: 0.2`"),
    "reference_free": (True, "training without a reference model is not implemented"),
    "precompute_ref_log_probs": (True, "leave it out: the reference model scores pairs once"),
    "max_prompt_length": (512, "`train.model.seq_length` limits prompt and answer together"),
    "model_name_or_path": ("m", "write `train.system.pretrained_checkpoint: m`; a directory"),
    "attn_implementation": ("sdpa", "leave it out: `train.model.attention_backend: auto` selects"),
    "use_peft": (True, "write `train.model.peft_type: lora`"),
    # LoraConfig
    "r": (8, "write `train.model.lora_dim: 8`"),
    "target_modules": (["q_proj"], "write `train.model.lora_target_modules: "),
    "bias": ("none", "leave it out: biases are frozen"),
    "task_type": ("CAUSAL_LM", "leave it out: `train.model.family` selects the model"),
    "modules_to_save": (["lm_head"], "modules trained next to adapters are not implemented"),
    "use_rslora": (True, "write `train.model.lora_alpha`; lora_alpha x sqrt(lora_dim)"),
}
OWN_NAMES = ("weight_decay", "adam_beta1", "adam_beta2", "bf16", "fp16", "seed")
OWN_NAMES += ("early_stopping_patience", "lora_alpha", "lora_dropout")
VALUES = {
    "unlimited-steps": ("max_steps", -1, "write `train.model.train_iters`; the number of steps"),
    "ratio-of-warmup": ("warmup_steps", 0.1, "write `train.model.lr_warmup_fraction: 0.1`"),
    "no-warmup": ("warmup_steps", 0, "write `train.model.lr_warmup_iters: 0`"),
    "ratio-of-steps": ("eval_steps", 0.25, "write `train.model.eval_interval`; its value is 0.25"),
    "unknown-schedule": ("lr_scheduler_type", "polynomial", "the implemented schedules are"),
    "unknown-optimizer": ("optim", "adafactor", "the implemented optimizers are adam (AdamW)"),
    "kept-activations": ("gradient_checkpointing", False, "leave it out: activations are not"),
    "resume-newest": ("resume_from_checkpoint", True, "leave it out: a run resumes"),
    "no-logger": ("report_to", "none", "leave it out"),
    "logger": ("report_to", ["mlflow"], "train.system.mlflow_experiment: NAME"),
    "unknown-logger": ("report_to", "aim", "aim is not supported; TensorBoard, W&B, MLflow"),
    "torchrun": ("nproc_per_node", 8, "a name of torchrun; write `experiment.runner.nproc_per_"),
    "dashes": ("--nproc-per-node", 8, "write `experiment.runner.nproc_per_node: 8`"),
    "cpu": ("use_cpu", True, "write `train.system.device: cpu`"),
    "best": ("save_strategy", "best", "write `train.system.save_best: true`; a checkpoint after"),
    "fraction-of-validation": ("val_set_size", 0.05, "write `train.data.split: 95,5`"),
    "number-of-validation": ("val_size", 100, "write `train.data.split`; fractions, such as"),
    "quantized": ("adapter", "qlora", "quantized base models (qlora) are not implemented"),
    "dtype": ("torch_dtype", "bfloat16", "write `train.system.bf16: true`"),
}


@pytest.mark.parametrize(("name", "value", "part"), VALUES.values(), ids=VALUES)
def test_value_decides(name: str, value: Any, part: str) -> None:
    assert part in replacement_of(name, value)


@pytest.mark.parametrize("name", COMMON)
def test_common_setting_of_hugging_face_is_answered(name: str) -> None:
    value, part = COMMON[name]
    answer = unknown_message(name, value)
    assert answer.startswith(f"is a name of {TRAINER_NAMES[name].origin}; ")
    assert part in answer


@pytest.mark.parametrize("name", OWN_NAMES)
def test_name_that_both_have_is_accepted(name: str) -> None:
    assert lookup(name) is not None
    assert name not in TRAINER_NAMES


def test_every_training_argument_is_answered() -> None:
    transformers = pytest.importorskip("transformers")
    names = [field.name for field in dataclasses.fields(transformers.TrainingArguments)]
    assert len(names) > 100
    answers = {name: unknown_message(name) for name in names if lookup(name) is None}
    assert [name for name, text in answers.items() if text.startswith("unknown")] == []


def test_no_name_is_an_argument() -> None:
    assert [name for name in TRAINER_NAMES if lookup(name) is not None] == []


@pytest.mark.parametrize("name", TRAINER_NAMES)
def test_keys_are_those_of_explain(name: str) -> None:
    keys = {entry.key for entry in experiment_entries()}
    keys |= {f"experiment.runner.{option}" for option in TORCHRUN_OPTIONS}
    for key in TRAINER_NAMES[name].keys:
        argument = lookup(key.rpartition(".")[2]) if key.startswith("train.") else None
        assert key in keys or (
            argument is not None and key == f"train.{argument[0].section}.{argument[0].name}"
        )


SETTINGS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.text())
)


@given(name=st.sampled_from(sorted(TRAINER_NAMES)), value=SETTINGS, size=SETTINGS, ranks=SETTINGS)
def test_any_value_has_an_answer(name: str, value: Any, size: Any, ranks: Any) -> None:
    context = SettingContext({"micro_batch_size": size}, ranks if isinstance(ranks, int) else None)
    entry = TRAINER_NAMES[name]
    replacement = entry.rule(value, context)
    assert replacement.settings or replacement.remark
    assert {setting.key for setting in replacement.settings} <= {
        *entry.keys,
        "train.system.fp16",
        "train.model.eval_iters",
        "train.system.save",
        "train.system.save_best",
    }
    assert replacement_of(name, value, context)


@pytest.mark.parametrize("name", COMMON)
def test_written_value_fits_the_argument(name: str) -> None:
    for setting in TRAINER_NAMES[name].rule(COMMON[name][0], SettingContext()).settings:
        assert is_known_key(setting.key)
        argument = lookup(setting.key.rpartition(".")[2])
        if argument is not None and setting.value is not None:
            convert(argument[0], setting.value)


@given(
    micro=st.integers(1, 64),
    accumulation=st.integers(1, 64),
    replicas=st.integers(1, 512),
    tensor=st.sampled_from([1, 2, 8]),
)
def test_accumulation_is_the_batch_that_it_amounts_to(
    micro: int, accumulation: int, replicas: int, tensor: int
) -> None:
    given_values = {"per_device_train_batch_size": micro, "tensor_model_parallel_size": tensor}
    answer = replacement_of(
        "gradient_accumulation_steps", accumulation, SettingContext(given_values, replicas * tensor)
    )
    assert f"`train.model.global_batch_size: {micro * accumulation * replicas}`" in answer


PLACES = {
    "model": ("conf/train/tiny.yaml", "  train_iters: 10\n", "  max_steps: 1000\n"),
    "train": ("conf/train/tiny.yaml", "data:\n", "max_steps: 1000\ndata:\n"),
    "experiment": (
        "conf/train.yaml",
        "  exp_name: demo\n",
        "  exp_name: demo\n  max_steps: 1000\n",
    ),
    "top": ("conf/train.yaml", "action: run\n", "action: run\nmax_steps: 1000\n"),
    "host": (
        "conf/train.yaml",
        "action: run\n",
        "action: run\nnode_specific: {localhost: {max_steps: 1000}}\n",
    ),
}


@pytest.mark.parametrize(("file", "old", "new"), PLACES.values(), ids=PLACES)
def test_name_is_answered_wherever_it_is(
    workspace: Workspace, file: str, old: str, new: str
) -> None:
    workspace.replace(file, old, new)
    with pytest.raises(ConfigError) as error:
        workspace.load()
    lines = [line for line in str(error.value).splitlines() if "max_steps" in line]
    assert len(lines) == 1
    assert "max_steps: is a name of Hugging Face; write `train.model.train_iters: 1000`" in lines[0]
    assert f"{file}:" in lines[0]


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("max_steps=1000", "write `train.model.train_iters=1000`"),
        ("train.max_steps=1000", "write `train.model.train_iters=1000`"),
        ("train.model.max_steps=1000", "write `train.model.train_iters=1000`"),
        ("+train.model.max_steps=1000", "write `train.model.train_iters=1000`"),
        ("experiment.learning_rate=1e-4", "write `train.model.lr=1e-4`"),
        ("nproc-per-node=4", "write `experiment.runner.nproc_per_node=4`"),
        ("train.model.gradient_accumulation_steps=4", "`train.model.global_batch_size=16`"),
    ],
)
def test_override_is_answered(workspace: Workspace, override: str, part: str) -> None:
    with pytest.raises(ConfigError) as error:
        workspace.load(override)
    assert part in str(error.value)


def test_accumulation_is_computed_from_the_yaml(workspace: Workspace) -> None:
    workspace.replace(
        "conf/train/tiny.yaml", "  train_iters: 10\n", "  gradient_accumulation_steps: 4\n"
    )
    with pytest.raises(ConfigError, match=r"write `train\.model\.global_batch_size: 16`"):
        workspace.load()


def test_own_key_of_a_command_stays_a_note(workspace: Workspace) -> None:
    workspace.replace("conf/train.yaml", "  exp_name: demo\n", "  exp_name: demo\n  debug: true\n")
    assert workspace.load().unreferenced_keys == ("experiment.debug",)


def test_interpolated_key_is_the_users_own(workspace: Workspace) -> None:
    workspace.replace(
        "conf/train.yaml", "  exp_name: demo\n", "  exp_name: demo\n  learning_rate: 1e-4\n"
    )
    workspace.replace("conf/train/tiny.yaml", "lr: 1.0e-3", "lr: ${experiment.learning_rate}")
    assert workspace.load().train["lr"] == pytest.approx(1e-4)
