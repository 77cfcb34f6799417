"""Rendering of a composed configuration as YAML, with its secrets hidden (``--cfg``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from flagscale.config.arguments.spec.values import did_you_mean
from flagscale.config.compose import compose_valid_overrides
from flagscale.config.interpolation import resolve_interpolations
from flagscale.config.secrets import HIDDEN, redact, redact_overrides
from flagscale.config.sources import Sources
from flagscale.errors import ConfigError


def show_config(
    sources: Sources, part: str, *, package: str | None = None, resolved: bool = False
) -> tuple[str, bool]:
    """Return a part of a configuration as YAML.

    Args:
        sources: The YAML that the user named, the overrides, and the location of each key.
        part: ``job`` for the experiment's own part, ``hydra`` for Hydra's, ``all`` for both.
        package: Dotted key of the section to show; None for everything.
        resolved: Whether to resolve interpolations.

    Returns:
        The YAML, and whether a secret in it was hidden.

    Raises:
        ConfigError: if an override is invalid, the configuration cannot be composed or has no
        section ``package``.
    """
    # Composes even if an override is invalid, so that all invalid ones are reported at once.
    config, problems = compose_valid_overrides(sources)
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
    """Return Hydra's section with redacted overrides. Hydra stores them as a list and, for names of
    directories, as one text.
    """
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
    """Return the config groups in a directory, each with its options."""
    groups: dict[str, list[str]] = {}
    for path in sorted(directory.glob("*/*.yaml")):
        groups.setdefault(path.parent.name, []).append(path.stem)
    return groups
