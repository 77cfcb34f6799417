"""Rules that replace settings of other trainers by keys of this project (:mod:`.trainer_names`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from flagscale.config.arguments.spec.argument import SettingContext

NO_EPOCHS = "lengths and intervals are numbers of steps, not epochs"


class Setting(NamedTuple):
    """A key of this project with a value; None if no value follows from the other name."""

    key: str
    value: Any = None

    def text(self, *, is_override: bool = False) -> str:
        """Return the setting as a YAML has it, or as an override."""
        if self.value is None:
            return self.key
        value = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return f"{self.key}={value}" if is_override else f"{self.key}: {value}"


class Replacement(NamedTuple):
    """Settings to write instead of a name, and a remark about them or in place of them."""

    settings: tuple[Setting, ...] = ()
    remark: str = ""

    def text(self, *, is_override: bool = False) -> str:
        """Return the replacement as the end of a message: "write `train.model.lr: 0.1`"."""
        settings = [f"`{setting.text(is_override=is_override)}`" for setting in self.settings]
        *first_settings, last = settings or [""]
        text = " and ".join(filter(None, (", ".join(first_settings), last)))
        return "; ".join(filter(None, (f"write {text}" if text else "", self.remark)))


Rule = Callable[[Any, SettingContext], Replacement]
"""Computes the replacement of a value; the value is None if only the name is known."""


@dataclass(frozen=True)
class TrainerName:
    """A setting of another trainer."""

    name: str
    origin: str
    """Name of the trainer or program."""
    keys: tuple[str, ...]
    """Dotted keys of this project that the name may stand for; empty if there is none."""
    rule: Rule


Entry = Callable[[str, str], TrainerName]
"""Builds the entry of a name and its origin."""


def same_value(key: str, remark: str = "") -> Entry:
    """Replace a name by a key with the same value."""
    return lambda name, origin: TrainerName(
        name, origin, (key,), lambda value, _: Replacement((Setting(key, value),), remark)
    )


def advice(text: str) -> Entry:
    """Answer a name that no key replaces."""
    return lambda name, origin: TrainerName(name, origin, (), lambda *_: Replacement((), text))


def by_value(key: str, values: Mapping[Any, Any], otherwise: str = "") -> Entry:
    """Replace a name by a key, value by value. A value that is a text starting with a lower-case
    letter and containing a space is advice. ``otherwise`` answers other values.
    """

    def replace(value: Any, _: SettingContext) -> Replacement:
        if value is None:
            return Replacement((Setting(key),), otherwise)
        replacement = values.get(_normalize(value), otherwise)
        if isinstance(replacement, Replacement):
            return replacement
        if isinstance(replacement, str) and " " in replacement:
            return Replacement((), replacement)
        return Replacement((Setting(key, replacement),))

    return lambda name, origin: TrainerName(name, origin, (key,), replace)


def _normalize(value: Any) -> Any:
    """Return a value in the form of the tables: texts in lower case, booleans as they are."""
    text = str(value).lower()
    return {"true": True, "false": False}.get(text, text)


def computed(rule: Rule, *keys: str) -> Entry:
    """Replace a name by a rule that returns settings of these keys."""
    return lambda name, origin: TrainerName(name, origin, keys, rule)


MICRO_BATCH = "train.model.micro_batch_size"
BATCH = "train.model.global_batch_size"
STEPS = "train.model.train_iters"
SAMPLES = "train.model.train_samples"
_PER_REPLICA = ("micro_batch_size", "batch_size", "per_device_train_batch_size")
_PARALLEL_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
)


def _integer(value: Any) -> int | None:
    try:
        return None if isinstance(value, bool) else int(str(value))
    except ValueError:
        return None


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, bool) else float(str(value))
    except ValueError:
        return None


def _count_replicas(context: SettingContext) -> int | None:
    """Return the number of model replicas, if the configuration states it."""
    if context.ranks is None:
        return None
    sizes = [_integer(context.values.get(name, 1)) for name in _PARALLEL_SIZES]
    if None in sizes:
        return None
    replicas, remainder = divmod(context.ranks, math.prod(size or 1 for size in sizes))
    return replicas if not remainder and replicas else None


def global_batch_of_accumulation(value: Any, context: SettingContext) -> Replacement:
    """Return the global batch size that a number of micro-batches per step amounts to."""
    meaning = "sequences per step: micro_batch_size x accumulation x model replicas"
    accumulation = _integer(value)
    micro_batch = next(
        (size for name in _PER_REPLICA if (size := _integer(context.values.get(name)))), None
    )
    if accumulation is None:
        return Replacement((Setting(BATCH),), meaning)
    replicas = _count_replicas(context)
    if micro_batch and replicas:
        return Replacement(
            (Setting(BATCH, micro_batch * accumulation * replicas),),
            f"micro-batches of {micro_batch} x {accumulation} x {replicas} model replicas",
        )
    factors = f"{micro_batch or 'micro_batch_size'} x {accumulation} x the number of model replicas"
    return Replacement((Setting(BATCH),), f"its value is {factors}")


def samples_of_epochs(value: Any, _: SettingContext) -> Replacement:
    factor = f"{value:g}" if isinstance(value, float) else value or "epochs"
    return Replacement(
        (Setting(SAMPLES),),
        f"its value is {factor} x the number of sequences in the data; {NO_EPOCHS}",
    )


def steps_of_limit(value: Any, _: SettingContext) -> Replacement:
    steps = _integer(value)
    if steps is not None and steps <= 0:
        return Replacement((Setting(STEPS),), "the number of steps has to be given")
    return Replacement((Setting(STEPS, value),))


def warmup_of_steps(value: Any, _: SettingContext) -> Replacement:
    number = _number(value)
    if number is not None and 0 < number < 1:
        return Replacement((Setting("train.model.lr_warmup_fraction", value),))
    return Replacement((Setting("train.model.lr_warmup_iters", value),))


def interval(key: str, remark: str = "") -> Entry:
    """Replace an interval in steps. A number below 1 is a fraction of all steps."""

    def replace(value: Any, context: SettingContext) -> Replacement:
        fraction = _number(value)
        if fraction is None or not 0 < fraction < 1:
            return Replacement((Setting(key, value),), remark)
        steps = next(
            (
                n
                for name in ("train_iters", "max_steps")
                if (n := _integer(context.values.get(name)))
            ),
            None,
        )
        if steps:
            return Replacement((Setting(key, math.ceil(steps * fraction)),), remark)
        return Replacement((Setting(key),), f"its value is {value} x the number of steps")

    return lambda name, origin: TrainerName(name, origin, (key,), replace)


def interval_of_strategy(interval_key: str, off: Replacement) -> Entry:
    """Replace a strategy (steps, epoch or no) by an interval."""
    values = {
        "steps": f"leave it out: `{interval_key}` sets the number of steps",
        "no": off,
        False: off,
        "epoch": Replacement((Setting(interval_key),), f"in steps; {NO_EPOCHS}"),
        "best": Replacement(
            (Setting("train.system.save_best", True),),
            "a checkpoint after each evaluation with the lowest validation loss so far",
        ),
    }
    return by_value(interval_key, values, f"it sets the number of steps; {NO_EPOCHS}")


_KEYS_OF_LOGGERS = {
    "wandb": "wandb_project",
    "mlflow": "mlflow_experiment",
    "comet_ml": "comet_project",
    "swanlab": "swanlab_project",
}
"""Loggers of Hugging Face's Trainer with the arguments that enable them."""
SUPPORTED_LOGGERS = (
    "TensorBoard, W&B, MLflow, Comet and SwanLab are, and `train.system.metrics_sinks` lists those "
    "of installed packages"
)


def loggers_of_report_to(value: Any, _: SettingContext) -> Replacement:
    names = value if isinstance(value, (list, tuple)) else [value]
    lowered = [str(name).lower() for name in names if name is not None]
    settings = [
        Setting(f"train.system.{key}", "NAME")
        for name, key in _KEYS_OF_LOGGERS.items()
        if name in lowered or (name == "wandb" and "all" in lowered)
    ]
    remarks = []
    if {"tensorboard", "all"} & set(lowered):
        remarks.append(
            "TensorBoard files are always written; `train.system.tensorboard_dir` sets where"
        )
    known = (*_KEYS_OF_LOGGERS, "tensorboard", "all", "none")
    unknown = [name for name in lowered if name not in known]
    if unknown:
        remarks.append(f"{' and '.join(unknown)} is not supported; {SUPPORTED_LOGGERS}")
    if not lowered:
        return Replacement(
            (Setting("train.system.wandb_project"),),
            "it enables Weights & Biases; TensorBoard files are always written",
        )
    if not settings and not remarks:
        remarks.append("leave it out: Weights & Biases is off by default")
    return Replacement(tuple(settings), "; ".join(remarks))


RECOMPUTE_ALL = Replacement(
    (
        Setting("train.system.recompute_granularity", "full"),
        Setting("train.model.recompute_method", "uniform"),
        Setting("train.model.recompute_num_layers", 1),
    )
)


def recomputation_of_switch(value: Any, _: SettingContext) -> Replacement:
    if _normalize(value) is False:
        return Replacement((), "leave it out: activations are not recomputed by default")
    return RECOMPUTE_ALL


def load_of_resume(value: Any, _: SettingContext) -> Replacement:
    if value is None or isinstance(_normalize(value), bool):
        if _normalize(value) is False:
            return Replacement(
                (Setting("train.system.load", "null"),), "a run starts at step 0 with it"
            )
        remark = "a run resumes from its newest checkpoint by default; "
        return Replacement((), f"leave it out: {remark}`train.system.load` sets another directory")
    return Replacement(
        (Setting("train.system.load", value),),
        "a directory of checkpoints of this project; its newest one is loaded",
    )


def patterns(key: str) -> Entry:
    """Replace a list of modules or parameters by patterns of names."""
    remark = "patterns of megatron.core's names, such as `embedding.*` and `decoder.layers.[0-3].*`"
    return lambda name, origin: TrainerName(
        name, origin, (key,), lambda *_: Replacement((Setting(key),), remark)
    )


def layers_to_train(value: Any, context: SettingContext) -> Replacement:
    """Return the patterns of the last layers, or of the first ones if the number is negative."""
    key, count = "train.model.trainable_parameters", _integer(value)
    layers = _integer(context.values.get("num_layers"))
    if not count or layers is None or abs(count) > layers:
        return Replacement((Setting(key),), "patterns of names, such as `decoder.layers.[30-31]`")
    first = layers - count if count > 0 else 0
    numbers = f"[{first}-{first + abs(count) - 1}]"
    return Replacement((Setting(key, f"decoder.layers.{numbers}"),))


def split_of_validation(value: Any, _: SettingContext) -> Replacement:
    """Return the split with a fraction, or a number of samples, for validation."""
    key, fraction = "train.data.split", _number(value)
    if fraction is None or not 0 < fraction < 1:
        return Replacement((Setting(key),), "fractions, such as 95,5 for 5 % of validation")
    return Replacement((Setting(key, f"{100 - 100 * fraction:g},{100 * fraction:g}"),))


def minutes_of_timeout(value: Any, _: SettingContext) -> Replacement:
    seconds = _number(value)
    minutes = None if seconds is None else f"{seconds / 60:g}"
    return Replacement((Setting("train.system.distributed_timeout_minutes", minutes),))
