"""Training programs of FlagScale, and keys of its runner that this project does not have.

Both are facts about FlagScale 0.6 to 2.x. Its arguments of training are in :mod:`.names` and
:mod:`.unsupported_families`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath

_PROGRAMS = PurePath("flagscale/train")
_GPT_PROGRAMS = (
    "megatron/train_gpt.py",
    "hetero/train_gpt.py",
    "train_aquila.py",
    "train_deepseek_v3.py",
    "train_llama.py",
    "train_mistral.py",
    "train_mixtral.py",
)
"""Programs that train the models of this project's own program: the current one, that of
heterogeneous devices, and those of single models in old versions."""
_IMAGES = "models of images and text"
_ROBOTICS = "models of robots"
_OTHER_FAMILIES: Mapping[str, str] = {
    "train_aquila_dpo": "preference optimization",
    "train_aquila_sft": "conversations with separate files of loss masks",
    "train_deepseek_v4": "DeepSeek-V4",
    "train_engram": "models with Engram's n-gram memory",
    "train_gr00t_n1_5": f"{_ROBOTICS} (GR00T)",
    "train_llava": f"{_IMAGES} (LLaVA)",
    "train_llava_onevision": f"{_IMAGES} (LLaVA-OneVision)",
    "train_memrift": "adapters with MemRift's offloading",
    "train_nemo_llama": "Llama, loaded by NeMo's bridge",
    "train_pi": f"{_ROBOTICS} (pi0)",
    "train_pi0": f"{_ROBOTICS} (pi0)",
    "train_qwen2_5_vl": f"{_IMAGES} (Qwen2.5-VL)",
    "train_qwen35": f"{_IMAGES} with linear attention (Qwen3.5)",
    "train_qwen3_vl": f"{_IMAGES} (Qwen3-VL)",
    "train_qwen_gr00t": f"{_ROBOTICS} (Qwen-GR00T)",
    "train_robobrain_x0": f"{_ROBOTICS} (RoboBrain-X0)",
    "train_robobrain_x0.5_qwengroot": f"{_ROBOTICS} (RoboBrain-X0.5)",
    "train_robotics": _ROBOTICS,
    "train_rwkv": "RWKV",
}
"""Models of FlagScale's other programs, by the name of the file without its suffix."""
_INSTEAD = {
    "train_aquila_dpo": "`dpo: true` trains on pairs of answers",
    "train_aquila_sft": "`sft: true` trains on conversations",
    "train_nemo_llama": "`pretrained_checkpoint` reads a Hugging Face model",
}


def is_gpt_program(path: str) -> bool:
    """Return True if a path, relative to FlagScale's checkout, is a program whose models this
    project's own program trains."""
    return PurePath(path) in [_PROGRAMS / name for name in _GPT_PROGRAMS]


def other_family(path: str) -> str | None:
    """Return the sentence about a program of FlagScale that trains other models; None for any other
    path."""
    program = PurePath(path)
    family = _OTHER_FAMILIES.get(program.stem)
    if family is None or program.parent not in (_PROGRAMS, _PROGRAMS / "megatron"):
        return None
    remedy = _INSTEAD.get(program.stem, "give its path in a checkout of FlagScale")
    return f"FlagScale's program for {family}, which this project does not train; {remedy}"


_MONITOR = (
    "a run's own agents watch it: `hang_detection_timeout`, `lost_host_timeout` and `notify` "
    "configure them"
)
_PERFORMANCE = (
    "progress lines and TensorBoard report throughput and memory every `train.system.log_interval` "
    "steps"
)
_PERFORMANCE_KEYS = (
    "enable_perf_monitor",
    "perf_breakdown",
    "perf_console_output",
    "perf_log_dir",
    "perf_log_format",
    "perf_log_interval",
    "perf_max_log_files",
    "perf_memory_tracking",
    "perf_model_type",
    "perf_monitor_interval",
)
_PROFILER = (
    "ranks are not started under a vendor's profiler; `train.system.profile: true` writes a trace "
    "of torch's"
)
_SERVING = "it belongs to serving or reinforcement learning, and only training is supported"
UNUSED_RUNNER_KEYS: Mapping[str, str] = {
    **dict.fromkeys(_PERFORMANCE_KEYS, _PERFORMANCE),
    "heartbeat": _MONITOR,
    **dict.fromkeys(("nsys_bin_path", "nsys_rep_file_path"), _PROFILER),
    **dict.fromkeys(("hipprof_bin_path", "hipprof_output_dir"), _PROFILER),
    "tracing": "calls of NCCL are not traced; after `hang_detection_timeout` all ranks write their "
    "stacks, and the rank that is behind is reported",
    **dict.fromkeys(
        ("deploy", "docker", "ray_dashboard_port", "ray_port", "runtime_env"), _SERVING
    ),
}
"""Keys of ``experiment.runner`` that are accepted without effect, with what has the effect here."""
_HARDWARE_HEALTH = ("command_timeout_s", "enabled", "interval_s", "stale_after_s")
_INSPECTOR = (
    "correlation_window_s",
    "dump_dir",
    "dump_interval_us",
    "enabled",
    "min_size_bytes",
    "plugin_library",
    "require_kernel_timing",
)
UNUSED_RUNNER_SECTIONS: Mapping[str, tuple[str, ...]] = {
    "heartbeat": (
        "checkpoint_timeout_s",
        "enabled",
        "expected_world_size",
        "failure_grace_period_s",
        "hardware_health",
        "initial_process_timeout_s",
        "initial_progress_timeout_s",
        "interval_s",
        "log_dir",
        "monitor_nice",
        "process_timeout_s",
        "progress_timeout_s",
        "publish_interval_s",
        "scan_interval_s",
    ),
    "heartbeat.hardware_health": _HARDWARE_HEALTH,
    "tracing": (
        "checkpoint_timeout_s",
        "collective_timeout_s",
        "delayed_enter_threshold_s",
        "enabled",
        "failure_grace_period_s",
        "inspector",
        "log_dir",
        "missing_exit_timeout_s",
        "monitor_nice",
        "p2p_match_window_s",
        "p2p_timeout_s",
        "probe_library",
        "scan_interval_s",
    ),
    "tracing.inspector": _INSPECTOR,
}
"""Names in those keys that are sections, so that a misspelling is reported."""
