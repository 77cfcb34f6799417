"""Every key that FlagScale 1.0 to 2.x reads has an effect, an equivalent or a sentence here.

The names were taken from its argument parser and from the code of its launcher.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from flagscale.config.arguments.compat.flagscale_runner import (
    UNUSED_RUNNER_KEYS,
    UNUSED_RUNNER_SECTIONS,
    is_gpt_program,
    other_family,
)
from flagscale.config.arguments.compat.names import why_unsupported, why_unused
from flagscale.config.arguments.spec.registry import lookup
from flagscale.config.arguments.spec.train_arguments import read_arguments
from flagscale.config.checks import experiment_notes
from flagscale.config.documented import documented_fields
from flagscale.config.explain import explain
from flagscale.config.runner_schema import Runner
from flagscale.config.torchrun import REFUSED_TORCHRUN_OPTIONS, TORCHRUN_OPTIONS
from flagscale.errors import ConfigError

if TYPE_CHECKING:
    from conftest import Workspace

OBSERVED = """
enable_perf_monitor no_perf_memory_tracking perf_breakdown perf_console_output perf_log_dir
perf_log_format perf_log_interval perf_max_log_files perf_memory_tracking perf_model_type
no_straggler_enable_comm_logging no_straggler_enable_gpu_profile
straggler_enable_comm_logging straggler_enable_gpu_profile straggler_log_dir
straggler_profiling_interval straggler_report_interval straggler_warmup_steps
wandb_log_model_interval
"""
KERNELS = """
te_fl_prefer te_fl_per_op te_fl_allow_vendors te_fl_deny_vendors mg_fl_prefer enable_flag_gems
flag_gems_log_path flag_gems_unused no_dsa_kernel_fusion use_padded_layerwise_optimizer
use_dualpipev moe_fb_overlap
apply_sft_dataset_separated_loss_mask_if_existed ckpt_convert_save
ckpt_convert_update_legacy_dist_opt_format
"""
OTHER_MODELS = """
use_engram engram_tokenizer_name_or_path engram_vocab_size engram_layer_ids engram_pad_id
engram_seed engram_kernel_size engram_hc_mult engram_embedding_parallel_size
engram_embedding_parallel_method engram_offload_embedding_optimizer_states max_ngram_size
n_embed_per_ngram n_head_per_ngram csa_compress_ratios o_groups o_lora_rank
action_discretization_bins dataset_type video_backend config_file patch_size temporal_patch_size
spatial_merge_size dataset_config max_samples_per_sequence shuffle_buffer_size add_faster_video
pos_skipping_range use_pos_skipping no_use_system_prompt freeze_LM freeze_ViT image_min_pixels
vision_root convert_checkpoint_from_megatron_to_transformers
"""
REFUSED = """
auto_tune auto_skip_spiky_loss spiky_loss_threshold skip_samples_range skip_iters_range
save_when_num_microbatches_change extra_eval_interval extra_valid_data_path finetune_dataset_type
qk_layernorm_hidden_dim wandb_mode wandb_api_key wandb_log_model padded_vocab_size
ckpt_convert_format load_adapter lr_decay_stablelm2_cosine_samples lr_decay_stablelm2_alpha
"""
KNOWN = """
norm_init_weight multiple_of hidden_dim_multiplier recompute_granularity_per_stage_micro_batch
recompute_method_per_stage_micro_batch recompute_num_layers_per_stage_micro_batch
rampup_save_interval standalone_embedding_stage use_partial_reduce_for_shared_embedding no_shared_fs
special_tokens_file tokenizer_path enable_hetero hetero_device_types hetero_current_device_type
hetero_pipeline_layer_split hetero_process_meshes expert_tensor_parallel_size_per_process_mesh
hetero_use_cpu_communication peft_type lora_target_modules lora_dim lora_alpha lora_dropout
lora_dropout_position lora_in_init_method lora_out_init_method muon_momentum no_muon_nesterov
muon_matched_adamw_rms muon_ns_steps
delay_wgrad_compute overlap_moe_expert_parallel_comm
"""
RUNNER_KEYS = """
type hostfile nnodes nproc_per_node node_rank master_addr master_port ssh_port no_shared_fs
per_node_task rdzv_id rdzv_backend rdzv_endpoint log_dir redirects tee backend enable_monitoring
monitor_interval perf_monitor_interval enable_perf_monitor enable_gpu_health_check heartbeat tracing
nsys_bin_path nsys_rep_file_path hipprof_bin_path hipprof_output_dir deploy docker ray_port
ray_dashboard_port runtime_env
"""


@pytest.mark.parametrize("name", (OBSERVED + KERNELS).split())
def test_key_that_changes_only_speed_or_observation_is_noted(name: str) -> None:
    assert why_unused(name)
    assert lookup(name) is None and not why_unsupported(name)


@pytest.mark.parametrize("name", (OTHER_MODELS + REFUSED).split())
def test_key_that_changes_the_training_is_refused(name: str) -> None:
    assert why_unsupported(name)
    assert lookup(name) is None and not why_unused(name)


def test_other_keys_have_effect() -> None:
    names = KNOWN.split()
    assert [name for name in names if lookup(name) is None and name not in REFUSED.split()] == [
        "standalone_embedding_stage"
    ] * (lookup("standalone_embedding_stage") is None)


@pytest.mark.parametrize("name", RUNNER_KEYS.split())
def test_runner_key_is_known_or_explained(name: str) -> None:
    known = [*documented_fields(Runner), *TORCHRUN_OPTIONS, *REFUSED_TORCHRUN_OPTIONS]
    assert (name in known) != (name in UNUSED_RUNNER_KEYS)
    assert name in explain(name)


def test_runner_sections_have_a_sentence() -> None:
    assert {name.partition(".")[0] for name in UNUSED_RUNNER_SECTIONS} <= set(UNUSED_RUNNER_KEYS)


@pytest.mark.parametrize(
    ("setting", "noted"),
    [
        ("heartbeat: {enabled: true, progress_timeout_s: 300}", True),
        ("heartbeat: {enabled: false, progress_timeout_s: 300}", False),
        ("tracing: {enabled: true, inspector: {enabled: true, dump_dir: d}}", True),
        ("tracing: null", False),
        ("perf_log_interval: 7", True),
    ],
)
def test_key_of_flagscale_runner_is_noted_if_on(
    workspace: Workspace, setting: str, noted: bool
) -> None:
    workspace.replace("conf/train.yaml", "nnodes: 1", setting)
    name = setting.partition(":")[0]
    notes = experiment_notes(workspace.load(purpose="plan"), 1)
    matching = [n for n in notes if n.startswith(f"experiment.runner.{name} has no effect: ")]
    assert matching == [
        f"experiment.runner.{name} has no effect: {UNUSED_RUNNER_KEYS[name]}"
    ] * int(noted)


def test_misspelled_name_in_nested_section_is_reported(workspace: Workspace) -> None:
    setting = "heartbeat: {enabled: true, hardware_health: {intervl_s: 5}}"
    workspace.replace("conf/train.yaml", "nnodes: 1", setting)
    with pytest.raises(ConfigError) as error:
        workspace.load(purpose="plan")
    (problem,) = error.value.problems
    assert problem.key == "experiment.runner.heartbeat.hardware_health.intervl_s"
    assert "did you mean 'interval_s'" in problem.message


PROGRAMS = {
    "flagscale/train/megatron/train_gpt.py": True,
    "./flagscale/train/megatron/train_gpt.py": True,
    "flagscale/train/hetero/train_gpt.py": True,
    "flagscale/train/train_mixtral.py": True,
    "flagscale/train/megatron/train_engram.py": False,
    "flagscale/train/megatron/train_deepseek_v4.py": False,
    "flagscale/train/megatron/train_qwen35.py": False,
    "flagscale/train/megatron/train_qwen3_vl.py": False,
    "flagscale/train/megatron/train_robobrain_x0.5_qwengroot.py": False,
    "./flagscale/train/train_rwkv.py": False,
    "flagscale/train/train_gr00t_n1_5.py": False,
    "other/train/train_gpt.py": None,
    "other/train_rwkv.py": None,
    "flagscale/train/megatron/train_new.py": None,
}
"""Programs: True if they train what this project's program does, False if another family."""


@pytest.mark.parametrize(("path", "same"), PROGRAMS.items(), ids=PROGRAMS)
def test_program_of_flagscale_is_alias_or_names_family(path: str, same: bool | None) -> None:
    assert is_gpt_program(path) == bool(same)
    sentence = other_family(path) or ""
    assert ("which this project does not train" in sentence) == (same is False)


@pytest.mark.parametrize(("value", "is_contradicted"), [(1e-5, True), (1e-6, False)])
def test_another_name_is_compared_with_the_value_that_counts(
    value: float, is_contradicted: bool
) -> None:
    sections = {
        "system": {"norm_epsilon": 1e-5},
        "model": {"norm_epsilon": 1e-6},
        "data": {"layernorm_epsilon": value},
    }
    contradictions = read_arguments(sections, "train.").contradictions
    assert [problem.key for problem in contradictions] == (
        ["train.data.layernorm_epsilon"] if is_contradicted else []
    )
