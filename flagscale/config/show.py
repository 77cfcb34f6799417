"""A composed configuration as text for people, its secrets hidden."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from flagscale.config.arguments.values import did_you_mean
from flagscale.config.compose import composed
from flagscale.config.resolve import resolve
from flagscale.config.secrets import HIDDEN, redact, redact_overrides
from flagscale.config.sources import Sources
from flagscale.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig


def shown(
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
    found = _hydras_own(hydra) if part != "job" else {}
    if part != "hydra":
        found |= resolve(config, sources) if resolved else _plain(config)
    text = _text(_select(redact(found), package), package)
    return text, HIDDEN in text


def _plain(config: DictConfig) -> dict[Any, Any]:
    from omegaconf import OmegaConf

    found: Any = OmegaConf.to_container(config)
    return dict(found)


def _hydras_own(config: DictConfig) -> dict[Any, Any]:
    """Hydra keeps the overrides as they were typed, and in one piece for names of directories."""
    found = _plain(config)
    overrides = redact_overrides(found["overrides"]["task"])
    found["overrides"]["task"] = overrides
    found["job"]["override_dirname"] = ",".join(overrides)
    return {"hydra": found}


def _select(data: dict[Any, Any], package: str | None) -> Any:
    found: Any = data
    for name in package.split(".") if package and package != "_global_" else ():
        known = [str(key) for key in found] if isinstance(found, dict) else []
        if name not in known:
            raise ConfigError(f"--package {package}: no {name!r} there{did_you_mean(name, known)}")
        found = found[name]
    return found


def _text(found: Any, package: str | None) -> str:
    from omegaconf import OmegaConf

    if not isinstance(found, (dict, list)):
        return f"{found}\n"
    head = f"# @package {package}\n" if package else ""
    return head + OmegaConf.to_yaml(found)


def groups(directory: Path) -> dict[str, list[str]]:
    """The config groups in a directory and what there is to choose in each."""
    found: dict[str, list[str]] = {}
    for path in sorted(directory.glob("*/*.yaml")):
        found.setdefault(path.parent.name, []).append(path.stem)
    return found
