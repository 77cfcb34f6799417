"""Registry of metrics sinks, including those of installed packages."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from flagscale.errors import ConfigError, Problem
from flagscale.registry import Registry
from flagscale.sinks.base import MetricsSink

SINKS_KEY = "metrics_sinks"
"""Argument that lists the sinks of packages."""
ENABLING_KEYS: Mapping[str, str] = {
    "tensorboard": "tensorboard_dir",
    "wandb": "wandb_project",
    "mlflow": "mlflow_experiment",
    "comet": "comet_project",
    "swanlab": "swanlab_project",
}
"""Built-in sinks with the arguments that enable them."""
METRICS_SINKS = Registry(
    "flagscale.metrics_sinks",
    "metrics sink",
    {
        "tensorboard": "flagscale.sinks.tensorboard_sink:TensorBoardSink",
        "wandb": "flagscale.sinks.wandb_sink:WandbSink",
        "mlflow": "flagscale.sinks.mlflow_sink:MlflowSink",
        "comet": "flagscale.sinks.comet_sink:CometSink",
        "swanlab": "flagscale.sinks.swanlab_sink:SwanLabSink",
    },
)


def list_enabled_sinks(values: Mapping[str, Any]) -> list[str]:
    """Return the names of the sinks that arguments enable, built-in ones first."""
    builtin = [name for name, key in ENABLING_KEYS.items() if values[key]]
    return [*builtin, *dict.fromkeys(values[SINKS_KEY] or ())]


def check_sink_names(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the violations of ``metrics_sinks``: the argument, and the problem."""
    for name in values[SINKS_KEY] or ():
        if name in ENABLING_KEYS:
            yield SINKS_KEY, f"{name!r} is built in; `{ENABLING_KEYS[name]}` enables it"
        elif name not in (installed := METRICS_SINKS.installed_names()):
            known = f"installed: {', '.join(installed)}" if installed else "none is installed"
            yield SINKS_KEY, f"no metrics sink is called {name!r}; {known}"


def load_sink(name: str) -> MetricsSink:
    """Create the sink called ``name``, and check that its client is installed.

    Raises:
        ConfigError: the sink or its client is not installed, or the sink fails to load.
    """
    key = ENABLING_KEYS.get(name, SINKS_KEY)
    try:
        sink: MetricsSink = METRICS_SINKS.create(name, MetricsSink)
    except ConfigError as error:
        raise ConfigError(Problem(key, error.message), hint=error.hint) from error
    if sink.package and not _is_installed(sink.package):
        text = f"is set, but the Python package {sink.package} is not installed"
        hint = f"install {sink.package}, or remove {key}"
        raise ConfigError(Problem(key, text), hint=hint)
    return sink


def create_sinks(values: Mapping[str, Any], environment: Mapping[str, str]) -> list[MetricsSink]:
    """Create the enabled sinks, and check that they can be used.

    Raises:
        ConfigError: with every sink that is not installed or not usable as configured.
    """
    sinks: list[MetricsSink] = []
    errors: list[ConfigError] = []
    for name in list_enabled_sinks(values):
        try:
            sink = load_sink(name)
        except ConfigError as error:
            errors.append(error)
            continue
        if unusable := sink.explain_unusable(values, environment):
            problem, hint = unusable
            key = ENABLING_KEYS.get(name, SINKS_KEY)
            errors.append(ConfigError(Problem(key, problem), hint=hint))
        sinks.append(sink)
    if errors:
        hints = dict.fromkeys(error.hint for error in errors if error.hint)
        problems = [problem for error in errors for problem in error.problems]
        raise ConfigError(problems, hint="; ".join(hints) or None)
    return sinks


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False
