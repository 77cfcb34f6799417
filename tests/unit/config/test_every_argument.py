"""No argument is taken and then has no effect without a word.

Each is read by this project's code, or is a field of a configuration that is handed to
megatron.core and read there by a module that training here reaches; or a table says that it is
refused, or noted. What is read is told from the source: nothing is imported that needs torch.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from flagscale.config.arguments import fallbacks, foreign, idle, rules
from flagscale.config.arguments.foreign import family, refusal, remark
from flagscale.config.arguments.parser import canonicalise
from flagscale.config.arguments.registry import aliases, arguments, registry
from flagscale.config.arguments.spec import Argument
from flagscale.config.checks import check_arguments, notes
from flagscale.config.documented import documented
from flagscale.config.overrides import SUBSECTIONS
from flagscale.config.schema import Commands, Environments, Experiment, Runner, Task, Train

PACKAGE = Path(__file__).resolve().parents[3] / "flagscale"

HANDED_ON = {
    f"megatron.core {name}"
    for name in (
        "ModelParallelConfig",
        "TransformerConfig",
        "OptimizerConfig",
        "DistributedDataParallelConfig",
    )
}
"""Origins of fields whose classes are built from all arguments that have their names."""

NOT_REACHED = re.compile(
    r"(inference|export|ssm|post_training|quantization|extensions|resharding|"
    r"models/(bert|T5|multimodal|vision|retro|mamba|mimo|huggingface)|distributed/fsdp|"
    r"distributed/torch_\w+|optimizer/(cpu_offloading|muon)|full_cuda_graph|fp[48]_utils|"
    r"transformer/(experimental_attention_variant|heterogeneous|"
    r"multi_token_prediction|cuda_graphs|\w+_config)|models/common/(model_chunk_schedule_plan)|"
    r"models/gpt/(fine_grained_callables|experimental\w+)|"
    r"pipeline_parallel/(combined_1f1b|fine_grained\w+)|optimizer/optimizer_config|"
    r"distributed/distributed_data_parallel_config|model_parallel_config)\b"
)
"""Modules of megatron.core that training here never calls, and those that only define fields."""

JUDGES = ("rules", "precision", "idle", "fallbacks", "mesh_rules", "checks", "placement", "meshes")
JUDGES += ("shares", "layout", "adapters", "conversations", "families", "growth", "resuming")
JUDGES += ("phases", "external", "explain", "reference", "architecture", "latent")
JUDGES += ("heads", "mixtures", "schedule", "tokenizers")
"""Modules of ours whose reading has no effect but a message, or that others have to ask."""

BY_PARTS = ("lr_decay", "lr_warmup", "lr_wsd_decay", "train")
"""Lengths whose unit is put behind: ``values[f"{what}_samples"]``."""

OTHERWISE = {
    "moe_enable_deepep": "chooses the flexible dispatcher's backend as the configuration is made",
    "allow_fallbacks": "is what the judges themselves go by",
    "save_interval": "read by growth.save_interval",
    "rampup_save_interval": "read by growth.save_interval",
    "exit_on_missing_checkpoint": "read by rules.needs_checkpoint",
    "end_weight_decay": "read by schedule.weight_decays",
    "train_data_path": "read as one of three",
    "valid_data_path": "read as one of three",
    "hetero_mode": "chooses between meshes and replicas (shares.is_on)",
    "test_data_path": "read as one of three",
}
"""Arguments that this test cannot judge, and what they do."""

BASE = {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 8, "seq_length": 32}
BASE |= {"lr": 1e-3, "train_iters": 10}


def _read_here() -> set[str]:
    """Names that this project's code takes from arguments, or from what is made of them."""
    found = {f"{part}_{unit}" for part in BY_PARTS for unit in ("iters", "samples")}
    for part in ("train", "launcher", "config"):
        for path in PACKAGE.glob(f"{part}/**/*.py"):
            if path.stem not in JUDGES:
                found.update(_names(path))
    return found


def _names(path: Path) -> Iterator[str]:
    """``args.name``, ``config.name``, ``values["name"]`` and ``getattr(args, "name")``."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and _is_of_arguments(node.value):
            yield node.attr
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            yield str(node.slice.value)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            yield ast.unparse(node.args[1]).strip("'")


def _is_of_arguments(node: ast.expr) -> bool:
    return ast.unparse(node).rpartition(".")[2].lstrip("_") in ("args", "config", "out")


def _read_by_core() -> set[str]:
    spec = importlib.util.find_spec("megatron")
    parts = [] if spec is None else spec.submodule_search_locations or []
    roots = [root for part in parts if (root := Path(part) / "core").is_dir()]
    if not roots:
        pytest.skip("megatron.core is not installed")
    found: set[str] = set()
    for path in roots[0].rglob("*.py"):
        if not NOT_REACHED.match(path.relative_to(roots[0]).with_suffix("").as_posix()):
            found.update(re.findall(r"\.(\w+)", path.read_text(encoding="utf-8")))
    return found


def _answered(argument: Argument) -> bool:
    """Whether asking for something else than the default is refused, or noted."""
    plain = {a.name: a.default for a in arguments().values()} | BASE
    values = plain | {argument.name: _another(argument)}
    told = {name for name, _ in (*rules.broken(values), *fallbacks.notes(values))}
    noted = [name for names, _ in idle.notes(values, [argument.name]) for name in names]
    return argument.name in told or argument.name in noted


def _another(argument: Argument) -> object:
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


def test_no_argument_is_taken_and_has_no_effect_without_a_word() -> None:
    here, core = _read_here(), _read_by_core()
    silent = [
        argument.name
        for argument in arguments().values()
        if argument.name not in here
        and not (argument.origin in HANDED_ON and argument.name in core)
        and argument.name not in OTHERWISE
        and not _answered(argument)
    ]
    assert silent == []


def _told(given: dict[str, object], runner: Runner | None = None) -> str:
    """All that a user is told of a YAML's arguments before a start."""
    train = Train(model={**BASE, "mock_data": True, **given})
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
    return "\n".join([*problems, *notes(experiment, 8)])


def test_what_has_no_effect_is_told_to_whoever_writes_it() -> None:
    """Not only known to a table."""
    answered = [argument for argument in arguments().values() if _answered(argument)]
    assert len(answered) > 150
    quiet = [a.name for a in answered if a.name not in _told({a.name: _another(a)})]
    assert quiet == []


def test_every_other_name_reaches_an_argument_or_is_answered() -> None:
    """Aliases, in either of their values where they are switches."""
    quiet = []
    for name, alias in aliases().items():
        values = [True, False] if registry()[name].kind == "bool" else [_another(registry()[name])]
        reached = [canonicalise(name, value) for value in values]
        effects = [found for found in reached if found is not None]
        changed = any(value != arguments()[target].default for target, value in effects)
        if not changed and not any(alias.name in _told({name: value}) for value in values):
            quiet.append(name)
    assert quiet == []


def test_tables_hold_no_stale_names() -> None:
    of_idle = {name for names, _ in idle.NOTED.values() for name in names} | set(idle.REFUSED)
    of_idle |= {name for need in idle.NEEDS for name in (need.master, *need.names.split())}
    assert of_idle - set(arguments()) == set()
    assert [name for name in foreign.REFUSED if name in registry()] == []
    taken = [(name, value) for name, value in foreign.VALUES if name in arguments()]
    assert [value for name, value in taken if value in (arguments()[name].choices or ())] == []
    assert {name for name, _ in foreign.VALUES} - set(arguments()) == {"action", "backend", "type"}


UNREAD = {
    "rdzv_backend": "has one value, static",
    "per_node_task": "is refused where it would mean anything (experiment_reader)",
    "enable_monitoring": "is noted where it is false (checks.notes)",
}
"""Keys beside ``train`` that nobody reads, and what is said of them."""


def test_no_key_beside_train_is_taken_and_has_no_effect() -> None:
    """Those of ``experiment`` and of its sections, nested ones too."""
    read: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        if not path.stem.endswith(("schema", "reference", "explain")) and path.stem not in JUDGES:
            read.update(_read_of_objects(path))
    kinds = {"": Experiment, **SUBSECTIONS}
    silent = {
        key
        for kind in kinds.values()
        for key, item in documented(kind).items()
        if item.name not in read
    }
    assert silent == set(UNREAD)


def _read_of_objects(path: Path) -> Iterator[str]:
    """``runner.name``, and names that are texts, as tables of options have them."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif path.match("*/slurm/*.py") and isinstance(node, ast.Constant):
            yield str(node.value)


def test_monitoring_that_is_switched_off_is_noted() -> None:
    off = Runner(enable_monitoring=False)
    assert "enable_monitoring: false has no effect" in _told({}, off)


FOREIGN = {
    "multiple_instance": (None, None),
    "rl_use_sequence_packing": ("reinforcement learning", "refused"),
    "inference_max_requests": ("inference", "refused"),
    "retriever_score_scaling": ("T5 and retrieval", "refused"),
    "bert_no_binary_head": ("BERT's second head", "noted"),
    "bert_binary_head": ("T5 and retrieval", "refused"),
    "dino_teacher_temp": ("models of images", "refused"),
    "lora_a2a_experimental": ("fine-tuning by adapters", "refused"),
    "ckpt_convert_save": ("conversion of checkpoints", "refused"),
    "freeze_LM": ("models of images", "refused"),
    "dataloader_save": ("models of images", "refused"),
    "action_token_key": ("robots' models", "refused"),
    "rwkv_head_size": ("mixers of other kinds", "refused"),
    "logits_load_kd_loss_alpha": ("distillation", "refused"),
    "mup_width_mult": ("maximal update parametrisation", "refused"),
    "mtp_detach_heads": ("multi-token prediction of other kinds", "refused"),
    "yarn_beta_fast": ("yarn by other names", "refused"),
    "gtp_remat_nccl_ub": ("weights in shards", "refused"),
    "moe_paged_stash_page_size": ("activations in pages", "refused"),
    "fault_injector_seed": ("faults on purpose", "refused"),
    "moe_fb_overlap": ("the DualPipeV schedule", "noted"),
    "flight_recorder_dump_path": ("variables of NCCL's flight recorder", "noted"),
    "moe_single_grouped_bias": ("kernels of Transformer Engine", "noted"),
    "activation_offload_fraction": ("offloading in detail", "noted"),
    "lion_beta1": ("optimizers of other kinds", "noted"),
    "otel_enabled": ("other programs' records", "noted"),
    "moe_routing_trace_path": ("figures and traces", "noted"),
    "async_strategy": ("how Megatron-LM's own loop saves memory and time", "noted"),
    "torch_fsdp2_no_reshard_after_forward": ("fully sharded data parallelism", "refused"),
    "inprocess_hard_timeout": ("restarts inside a process", "refused"),
    "no_one_logger": ("other programs' records", "noted"),
    "log_straggler": ("figures and traces", "noted"),
}


@pytest.mark.parametrize(("name", "answer"), FOREIGN.items(), ids=FOREIGN)
def test_names_of_the_field_have_an_answer(
    name: str, answer: tuple[str | None, str | None]
) -> None:
    title, kind = answer
    found = family(name)
    assert (found and found.title) == title
    assert (refusal(name) is not None, remark(name) is not None) == (
        kind == "refused",
        kind == "noted",
    )
    assert name not in registry() and name not in aliases()
