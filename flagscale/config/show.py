"""A composed configuration as text, its secrets hidden."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from flagscale.config.arguments.spec.values import did_you_mean
from flagscale.config.compose import composed
from flagscale.config.interpolation import resolve_interpolations
from flagscale.config.secrets import HIDDEN, redact, redact_overrides
from flagscale.config.sources import Sources
from flagscale.errors import ConfigError


def show_config(
    sources: Sources, part: str, *, package: str | None = None, resolved: bool = False
) -> tuple[str, bool]:
    """A part of a configuration as YAML, and whether something in it was hidden: the experiment's
    own (``job``), Hydra's, or both; with ``package`` only what is at that dotted key.

    Raises ConfigError for what cannot be composed and for a ``package`` that is not there.
    """
    config, problems = composed(sources)
    if problems:
        raise ConfigError(problems)
    hydra = config.pop("hydra")
    content = _hydra_section(hydra) if part != "job" else {}
    if part != "hydra":
        content |= resolve_interpolations(config, sources) if resolved else _to_plain(config)
    text = _to_yaml(_select_package(redact(content), package), package)
    return text, HIDDEN in text


def _to_plain(config: DictConfig) -> dict[Any, Any]:

    content: Any = OmegaConf.to_container(config)
    return dict(content)


def _hydra_section(config: DictConfig) -> dict[Any, Any]:
    """Hydra keeps the overrides as they were typed, and in one piece for names of directories."""
    section = _to_plain(config)
    overrides = redact_overrides(section["overrides"]["task"])
    section["overrides"]["task"] = overrides
    section["job"]["override_dirname"] = ",".join(overrides)
    return {"hydra": section}


def _select_package(data: dict[Any, Any], package: str | None) -> Any:
    content: Any = data
    for name in package.split(".") if package and package != "_global_" else ():
        names = [str(key) for key in content] if isinstance(content, dict) else []
        if name not in names:
            raise ConfigError(f"--package {package}: no {name!r} there{did_you_mean(name, names)}")
        content = content[name]
    return content


def _to_yaml(content: Any, package: str | None) -> str:

    if not isinstance(content, (dict, list)):
        return f"{content}\n"
    head = f"# @package {package}\n" if package else ""
    return head + OmegaConf.to_yaml(content)


def config_groups(directory: Path) -> dict[str, list[str]]:
    """The config groups in a directory and what there is to choose in each."""
    groups: dict[str, list[str]] = {}
    for path in sorted(directory.glob("*/*.yaml")):
        groups.setdefault(path.parent.name, []).append(path.stem)
    return groups
