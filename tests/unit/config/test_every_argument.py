"""Coverage of the arguments: none is accepted and then silently ignored.

Each argument meets one of these conditions:

- The code of this project reads it.
- It is a field of a megatron.core configuration, and a module that training uses reads it.
- A table lists it as rejected, or as reported by a note.

Reads are detected in the source text, so nothing that needs torch is imported.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.arguments import resolve_argument, train_arguments

from flagscale.config.arguments.check import check_values, note_substitutions
from flagscale.config.arguments.compat.names import (
    UNSUPPORTED,
    UNSUPPORTED_VALUES,
    unsupported_family,
    why_unsupported,
    why_unused,
)
from flagscale.config.arguments.compat.unused import (
    REFUSED_ARGUMENTS,
    REQUIREMENTS,
    UNUSED_ARGUMENTS,
    note_unused,
)
from flagscale.config.arguments.spec.argument import Argument
from flagscale.config.arguments.spec.registry import aliases, arguments, registry
from flagscale.config.checks import check_arguments, experiment_notes
from flagscale.config.documented import documented_fields
from flagscale.config.overrides import SUBSECTIONS
from flagscale.config.schema import Commands, Environments, Experiment, Runner, Task

PACKAGE = Path(__file__).resolve().parents[3] / "flagscale"

CORE_CONFIG_ORIGINS = {
    f"megatron.core {name}"
    for name in (
        "ModelParallelConfig",
        "TransformerConfig",
        "OptimizerConfig",
        "DistributedDataParallelConfig",
    )
}
"""Origins of arguments that are copied by name into configurations of megatron.core."""

UNUSED_CORE_MODULES = re.compile(
    r"(inference|export|ssm|post_training|quantization|extensions|resharding|"
    r"models/(bert|T5|multimodal|vision|retro|mamba|mimo|huggingface)|distributed/fsdp|"
    r"distributed/torch_\w+|optimizer/(cpu_offloading|muon)|full_cuda_graph|fp[48]_utils|"
    r"transformer/(experimental_attention_variant|heterogeneous|"
    r"multi_token_prediction|cuda_graphs|\w+_config)|models/common/(model_chunk_schedule_plan)|"
    r"models/gpt/(fine_grained_callables|experimental\w+)|"
    r"pipeline_parallel/(combined_1f1b|fine_grained\w+)|optimizer/optimizer_config|"
    r"distributed/distributed_data_parallel_config|model_parallel_config)\b"
)
"""Modules of megatron.core that training never calls, and those that only define fields."""

CHECK_MODULES = (
    "check",
    "precision",
    "unused",
    "checks",
    "placement",
    "meshes",
    "microbatch_split",
    "layout",
    "parallel_layout",
    "adapters",
    "model_family",
    "resuming",
    "data",
    "explain",
    "reference",
    "layers",
    "tokenizers",
)
"""Modules of this project whose reads only produce messages or serve other modules."""

LENGTH_PREFIXES = ("lr_decay", "lr_warmup", "lr_wsd_decay", "train")
"""Prefixes of lengths that are read with a unit suffix: ``values[f"{prefix}_samples"]``."""

INDIRECTLY_READ = {
    "num_virtual_stages_per_pipeline_rank": "read by parallel_layout.virtual_chunks",
    "num_layers_per_virtual_pipeline_stage": "read by parallel_layout.virtual_chunks",
    "moe_enable_deepep": "chooses the flexible dispatcher's backend as the configuration is made",
    "allow_fallbacks": "read by the checks themselves",
    "save_interval": "read by optimizer.save_interval_at",
    "rampup_save_interval": "read by optimizer.save_interval_at",
    "exit_on_missing_checkpoint": "read by resuming.needs_checkpoint",
    "end_weight_decay": "read by optimizer.weight_decays",
    "train_data_path": "read as one of three",
    "valid_data_path": "read as one of three",
    "hetero_mode": "chooses between meshes and replicas (uses_microbatch_split)",
    "test_data_path": "read as one of three",
}
"""Arguments whose use this test cannot detect, with their use."""

BASE = {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 8, "seq_length": 32}
BASE |= {"lr": 1e-3, "train_iters": 10}


def _names_read_by_project() -> set[str]:
    """Return the names that the code of this project reads from arguments and derived values."""
    names = {f"{part}_{unit}" for part in LENGTH_PREFIXES for unit in ("iters", "samples")}
    for part in ("train", "launcher", "config", "sinks"):
        for path in PACKAGE.glob(f"{part}/**/*.py"):
            if path.stem not in CHECK_MODULES:
                names.update(_names_read_in_file(path))
    return names


def _names_read_in_file(path: Path) -> Iterator[str]:
    """Yield names read as ``args.x``, ``config.x``, ``values["x"]`` or ``getattr(args, "x")``."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and _is_argument_namespace(node.value):
            yield node.attr
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            yield str(node.slice.value)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            yield ast.unparse(node.args[1]).strip("'")


def _is_argument_namespace(node: ast.expr) -> bool:
    return ast.unparse(node).rpartition(".")[2].lstrip("_") in ("args", "config", "out")


def _names_read_by_core() -> set[str]:
    spec = importlib.util.find_spec("megatron")
    parts = [] if spec is None else spec.submodule_search_locations or []
    roots = [root for part in parts if (root := Path(part) / "core").is_dir()]
    if not roots:
        pytest.skip("megatron.core is not installed")
    names: set[str] = set()
    for path in roots[0].rglob("*.py"):
        if not UNUSED_CORE_MODULES.match(path.relative_to(roots[0]).with_suffix("").as_posix()):
            names.update(re.findall(r"\.(\w+)", path.read_text(encoding="utf-8")))
    return names


def _is_reported(argument: Argument) -> bool:
    """Return whether a value other than the default is rejected or noted."""
    defaults = {a.name: a.default for a in arguments().values()} | BASE
    values = defaults | {argument.name: _other_value(argument)}
    reported = {name for name, _ in (*check_values(values), *note_substitutions(values))}
    noted = [name for names, _ in note_unused(values, [argument.name]) for name in names]
    return argument.name in reported or argument.name in noted


def _other_value(argument: Argument) -> object:
    default = argument.default
    if argument.choices:
        value: object = next(choice for choice in argument.choices if choice != default)
    elif argument.kind == "bool":
        value = not default
    elif argument.kind == "str":
        value = "another"
    else:
        value = (argument.minimum or 0) + 1 if default is None or argument.many else default + 1
        if argument.maximum is not None and value > argument.maximum:
            value = argument.maximum / 2
    return [value] if argument.many else value


def test_no_argument_is_silently_ignored() -> None:
    project_names, core_names = _names_read_by_project(), _names_read_by_core()
    ignored = [
        argument.name
        for argument in arguments().values()
        if argument.name not in project_names
        and not (argument.origin in CORE_CONFIG_ORIGINS and argument.name in core_names)
        and argument.name not in INDIRECTLY_READ
        and not _is_reported(argument)
    ]
    assert ignored == []


def _launch_messages(changes: dict[str, object], runner: Runner | None = None) -> str:
    """Return all problems and notes that a launch prints for these arguments."""
    train = train_arguments(model={**BASE, "mock_data": True, **changes})
    experiment = Experiment(
        name="x",
        exp_dir=Path("/x"),
        task=Task(entrypoint=Path("/x.py")),
        runner=runner or Runner(),
        envs=Environments(),
        cmds=Commands(),
        train=train,
        config_file=Path("/x.yaml"),
    )
    problems = [f"{problem.key}: {problem.message}" for problem in check_arguments(experiment)]
    return "\n".join([*problems, *experiment_notes(experiment, 8)])


def test_argument_without_effect_is_reported_to_user() -> None:
    """The table entry alone is not enough: the message must reach the user."""
    reported = [argument for argument in arguments().values() if _is_reported(argument)]
    assert len(reported) > 150
    ignored = [
        a.name for a in reported if a.name not in _launch_messages({a.name: _other_value(a)})
    ]
    assert ignored == []


def test_every_alias_sets_an_argument_or_is_reported() -> None:
    """Aliases are tried with a value, or with both values if they are switches."""
    ignored = []
    for name, alias in aliases().items():
        values = (
            [True, False] if registry()[name].kind == "bool" else [_other_value(registry()[name])]
        )
        results = [resolve_argument(name, value) for value in values]
        effects = [result for result in results if result is not None]
        changed = any(value != arguments()[target].default for target, value in effects)
        if not changed and not any(
            alias.name in _launch_messages({name: value}) for value in values
        ):
            ignored.append(name)
    assert ignored == []


def test_tables_have_no_stale_names() -> None:
    unused = {name for names, _ in UNUSED_ARGUMENTS.values() for name in names} | set(
        REFUSED_ARGUMENTS
    )
    unused |= {name for need in REQUIREMENTS for name in f"{need.required} {need.names}".split()}
    assert unused - set(arguments()) == set()
    assert [name for name in UNSUPPORTED if name in registry()] == []
    pairs = [(name, value) for name, value in UNSUPPORTED_VALUES if name in arguments()]
    assert [value for name, value in pairs if value in (arguments()[name].choices or ())] == []
    assert {name for name, _ in UNSUPPORTED_VALUES} - set(arguments()) == {
        "backend",
        "type",
    }


UNREAD_KEYS = {
    "rdzv_backend": "has one value, static",
    "per_node_task": "is refused where it would mean anything (experiment_reader)",
    "enable_gpu_health_check": "stands for health: quick (experiment_reader)",
    "enable_monitoring": "is noted where it is false (checks.notes)",
    "model_name": "FlagScale's, documented as without effect",
    "order": "FlagScale's, documented as without effect",
}
"""Keys outside ``train`` that no code reads, with the reason."""


def test_no_key_outside_train_is_silently_ignored() -> None:
    """Checks the keys of ``experiment`` and of its sections, including nested ones."""
    read: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        if (
            not path.stem.endswith(("schema", "reference", "explain"))
            and path.stem not in CHECK_MODULES
        ):
            read.update(_attributes_read_in_file(path))
    kinds = {"": Experiment, **SUBSECTIONS}
    ignored = {
        key
        for kind in kinds.values()
        for key, item in documented_fields(kind).items()
        if item.name not in read
    }
    assert ignored == set(UNREAD_KEYS)


def _attributes_read_in_file(path: Path) -> Iterator[str]:
    """Yield names read as attributes, and the string constants of the Slurm option tables."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif path.match("*/slurm/*.py") and isinstance(node, ast.Constant):
            yield str(node.value)


def test_disabled_monitoring_is_noted() -> None:
    runner = Runner(enable_monitoring=False)
    assert "enable_monitoring: false has no effect" in _launch_messages({}, runner)


EXTERNAL_NAMES = {
    "multiple_instance": (None, None),
    "rl_use_sequence_packing": ("reinforcement learning", "refused"),
    "inference_max_requests": ("inference", "refused"),
    "retriever_score_scaling": ("T5 and retrieval models", "refused"),
    "bert_no_binary_head": ("next-sentence prediction of BERT", "noted"),
    "bert_binary_head": ("T5 and retrieval models", "refused"),
    "dino_teacher_temp": ("models of images", "refused"),
    "lora_a2a_experimental": ("fine-tuning with adapters", "refused"),
    "ckpt_convert_save": ("conversion of checkpoints", "noted"),
    "freeze_LM": ("models of images", "refused"),
    "dataloader_save": ("models of images", "refused"),
    "action_token_key": ("robotics", "refused"),
    "rwkv_head_size": ("other sequence mixers", "refused"),
    "logits_load_kd_loss_alpha": ("knowledge distillation", "refused"),
    "mup_width_mult": ("maximal update parametrization", "refused"),
    "mtp_detach_heads": ("variants of multi-token prediction", "refused"),
    "yarn_beta_fast": ("YaRN by other names", "refused"),
    "gtp_remat_nccl_ub": ("sharded weights", "refused"),
    "moe_paged_stash_page_size": ("memory of activations", "refused"),
    "fault_injector_seed": ("fault injection", "refused"),
    "moe_fb_overlap": ("the DualPipeV schedule", "noted"),
    "flight_recorder_dump_path": ("NCCL flight recorder", "noted"),
    "moe_single_grouped_bias": ("kernels of Transformer Engine", "noted"),
    "activation_offload_fraction": ("details of offloading", "noted"),
    "soap_shampoo_beta": ("other optimizers", "noted"),
    "otel_enabled": ("external telemetry", "noted"),
    "moe_routing_trace_path": ("metrics, traces and checks", "noted"),
    "async_strategy": ("internals of Megatron-LM's training loop", "noted"),
    "torch_fsdp2_no_reshard_after_forward": ("fully sharded data parallelism", "refused"),
    "inprocess_hard_timeout": ("in-process restarts", "refused"),
    "no_one_logger": ("external telemetry", "noted"),
    "log_progress": ("metrics, traces and checks", "noted"),
}


@pytest.mark.parametrize(("name", "expected"), EXTERNAL_NAMES.items(), ids=EXTERNAL_NAMES)
def test_names_from_other_projects_are_explained(
    name: str, expected: tuple[str | None, str | None]
) -> None:
    title, kind = expected
    family = unsupported_family(name)
    assert (family and family.title) == title
    assert (why_unsupported(name) is not None, why_unused(name) is not None) == (
        kind == "refused",
        kind == "noted",
    )
    assert name not in registry() and name not in aliases()
