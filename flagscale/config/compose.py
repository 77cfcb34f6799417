"""From a YAML, its config groups and overrides to one composed configuration, by Hydra.

Hydra is imported only once the files have been checked, and its errors become one ConfigError.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import yaml

from flagscale.config.arguments.values import did_you_mean
from flagscale.config.interpolation import interpolation_hint, register
from flagscale.config.overrides import did_you_mean_key, normalize, parse
from flagscale.config.sources import OVERRIDE, trace
from flagscale.config.yaml_file import short
from flagscale.errors import ConfigError, Problem

if TYPE_CHECKING:
    from omegaconf import DictConfig


_APPENDED = re.compile(r"Could not append to config\. An item is already at '([^']*)'")
_NAMED = re.compile(r"'(?P<key>[^'=]*)[^']*'")


def config_file(config_path: Path, config_name: str) -> Path:
    """The YAML of this name in this directory, absolute.

    Raises ConfigError when there is none, listing what the directory holds; how either was given
    is not known here, so the message speaks of no option.
    """
    directory = config_path.absolute()
    if not directory.is_dir():
        raise ConfigError(f"no directory {short(directory)}")
    name = config_name.removesuffix(".yaml").removesuffix(".yml")
    file = directory / f"{name}.yaml"
    if file.is_file():
        return file
    there = _yaml_files(file.parent)
    holds = f"it has {', '.join(there)}" if there else "it has no YAML at all"
    if file.with_suffix(".yml").is_file():
        holds = f"{name}.yml must be called {name}.yaml"
    where = "the current directory" if directory == Path.cwd() else short(directory)
    raise ConfigError(f"no {name}.yaml in {where}; {holds}{did_you_mean(name, there)}")


def _yaml_files(directory: Path) -> list[str]:
    """The names of the YAML files in a directory, but for those that are hidden."""
    found = directory.glob("*.yaml") if directory.is_dir() else ()
    return sorted(path.stem for path in found if not path.name.startswith("."))


def compose(config_path: Path, config_name: str, overrides: Sequence[str]) -> DictConfig:
    """The composed configuration, interpolations unresolved, without the ``hydra`` section.

    Overrides of keys that the schema knows need no ``+``. Raises ConfigError for a file that
    cannot be read (every mistake of every file at once), an unknown config group, and every
    override of an unknown key or that cannot be understood.
    """
    file = config_file(config_path, config_name)
    trace(file, overrides)
    words = normalize(overrides)
    problems: list[Problem] = []
    while True:
        try:
            config = _compose(file, words)
        except ConfigError as error:
            problems += error.problems
            wrong = _culprits(error.__cause__, words)
            # Hydra tells of one at a time: without it, the next one shows.
            words = [word for word in words if word not in wrong]
            if wrong:
                continue
        if problems:
            raise ConfigError(problems)
        return config


def _compose(file: Path, overrides: list[str]) -> DictConfig:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from omegaconf import open_dict
    from omegaconf.errors import OmegaConfBaseException

    register()
    try:
        with initialize_config_dir(config_dir=str(file.parent), version_base=None):
            config = hydra_compose(file.stem, overrides=overrides, return_hydra_config=True)
            HydraConfig.instance().set_config(config)  # so that ${hydra:...} resolves later
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError) as error:
        _translate(error, file)  # Hydra raises the last two for some odd overrides
    with open_dict(config):
        del config["hydra"]
    return config


def _translate(error: Exception, file: Path) -> NoReturn:
    """Raises a ConfigError for what Hydra or OmegaConf found."""
    from hydra.errors import MissingConfigException, OverrideParseException
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError, GrammarParseError

    if isinstance(error, MissingConfigException):
        raise ConfigError(_missing_group(error.missing_cfg_file, error.options, file)) from error
    if isinstance(error, OverrideParseException):
        raise ConfigError(_unreadable(error.override, str(error))) from error
    cause = error.__cause__
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)):
        key = str(cause.full_key)
        raise ConfigError(Problem(key, _not_there(key), OVERRIDE)) from error
    if isinstance(cause, GrammarParseError):
        key, message = str(cause.full_key), str(cause).partition("\n")[0]
        message += interpolation_hint(message, key)
        raise ConfigError(Problem(key, message, trace(file, ()).place(key))) from error
    if isinstance(error, TypeError):
        message = f"Hydra cannot use these overrides: {error}; a config group takes names: train=8b"
        raise ConfigError(Problem("", message, OVERRIDE)) from error
    message = " ".join(str(error).split())
    appended = _APPENDED.match(message)
    if appended is not None:
        raise ConfigError(
            Problem(appended[1], "is set already; leave out the +", OVERRIDE)
        ) from error
    if message.startswith("Ambiguous value for argument"):
        key = message.split("'")[1].partition("=")[0]
        message = f"Hydra takes a comma for a sweep: `{key}=[a,b]` is a list, `{key}='a,b'` a text"
        raise ConfigError(Problem(key.lstrip("+"), message, OVERRIDE)) from error
    raise ConfigError(Problem("", message, short(file))) from error


def _culprits(error: BaseException | None, words: Sequence[str]) -> list[str]:
    """The overrides that an error of Hydra is about. None where others may follow from it: what is
    in a config group that is not there, nobody knows."""
    from hydra.errors import MissingConfigException, OverrideParseException

    if isinstance(error, OverrideParseException):
        return [word for word in words if word == error.override]
    named = _NAMED.search(str(error))
    if isinstance(error, MissingConfigException) or named is None:
        return []
    key = named["key"].lstrip("+~")
    return [word for word in words if (found := parse(word)) is not None and found.key == key]


def _missing_group(missing: str | None, options: Iterable[str] | None, file: Path) -> Problem:
    group, _, option = str(missing).rpartition("/")
    known = sorted(options or ())
    listed = f"; there are {', '.join(known)}" if known else ""
    where = short(file.parent / group) if group else short(file.parent)
    message = f"no {option}.yaml in {where}{listed}{did_you_mean(option, known)}"
    return Problem(group.replace("/", "."), message)


def _unreadable(override: str, message: str) -> Problem:
    found = parse(override)
    if found is None or found.value is None:
        return Problem(override, "expected key=value", OVERRIDE)
    complaint = message.splitlines()[0]
    if complaint.startswith("LexerNoViableAlt"):  # says nothing but its name
        complaint = "a character that has a meaning to Hydra"
    advice = f"quote it: '{found.key}=\"…\"'"
    return Problem(found.key, f"Hydra cannot read this value ({complaint}); {advice}", OVERRIDE)


def _not_there(key: str) -> str:
    # Another's program may know arguments that we do not; there is nothing to add elsewhere.
    more = f" (`+{key}=...` adds a new one)" if key.startswith("train.") else ""
    return f"no such key{did_you_mean_key(key)}{more}"
