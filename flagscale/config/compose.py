"""From a YAML, its config groups and overrides to one composed configuration, by Hydra.

Hydra is imported only once the files have been checked, and its errors become one ConfigError.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import yaml

from flagscale.config.arguments.compat.unsupported import why_unsupported, why_unused
from flagscale.config.arguments.spec.values import did_you_mean
from flagscale.config.experiment_reader import find_program
from flagscale.config.interpolation import (
    interpolation_hint,
    register_host_resolver,
    unreadable_interpolations,
)
from flagscale.config.overrides import did_you_mean_key, normalize_overrides, parse_override
from flagscale.config.schema import OWN_PROGRAM
from flagscale.config.sources import OVERRIDE, Sources, key_of_argument
from flagscale.config.yaml_file import short_path
from flagscale.errors import ConfigError, Problem

if TYPE_CHECKING:
    from omegaconf import DictConfig


_ALONE = threading.RLock()
_APPENDED = re.compile(r"Could not append to config\. An item is already at '([^']*)'")
_NAMED = re.compile(r"'(?P<key>[^'=]*)[^']*'")


def config_file(config_path: Path, config_name: str) -> Path:
    """The YAML of this name in this directory, absolute.

    Raises ConfigError when there is none, listing what the directory holds; how either was given
    is not known here, so the message speaks of no option.
    """
    directory = config_path.absolute()
    if not directory.is_dir():
        raise ConfigError(f"no directory {short_path(directory)}")
    name = config_name.removesuffix(".yaml").removesuffix(".yml")
    file = directory / f"{name}.yaml"
    if file.is_file():
        return file
    there = _yaml_files(file.parent)
    holds = f"it has {', '.join(there)}" if there else "it has no YAML at all"
    if file.with_suffix(".yml").is_file():
        holds = f"{name}.yml must be called {name}.yaml"
    where = "the current directory" if directory == Path.cwd() else short_path(directory)
    raise ConfigError(f"no {name}.yaml in {where}; {holds}{did_you_mean(name, there)}")


def _yaml_files(directory: Path) -> list[str]:
    """The names of the YAML files in a directory, but for those that are hidden."""
    files = directory.glob("*.yaml") if directory.is_dir() else ()
    return sorted(path.stem for path in files if not path.name.startswith("."))


def compose(sources: Sources) -> DictConfig:
    """The composed configuration, interpolations unresolved, without the ``hydra`` section.

    Overrides of keys that the schema knows need no ``+``. Raises ConfigError for an unknown config
    group, and every override of an unknown key or that cannot be understood.
    """
    config, problems = composed(sources)
    if problems:
        raise ConfigError(problems)
    del config["hydra"]
    return config


@contextmanager
def hydra_alone() -> Iterator[None]:
    """Hydra and OmegaConf keep what they are at in globals of the process: for as long as the block
    lasts they are one thread's alone, and afterwards whose they were before, a program's that
    uses Hydra itself."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf.basecontainer import BaseContainer

    with _ALONE:
        hydra, config = GlobalHydra.instance().hydra, HydraConfig.instance().cfg
        resolvers = dict(BaseContainer._resolvers)
        GlobalHydra.instance().hydra = None
        try:
            yield
        finally:
            # By now these may be other objects.
            GlobalHydra.instance().hydra, HydraConfig.instance().cfg = hydra, config
            BaseContainer._resolvers.clear()
            BaseContainer._resolvers.update(resolvers)


def composed(sources: Sources) -> tuple[DictConfig, list[Problem]]:
    """The configuration with its ``hydra`` section, composed without the overrides that are wrong,
    and what is wrong with them. Raises ConfigError where nothing can be composed."""
    overrides = normalize_overrides(sources.relocated)
    problems: list[Problem] = []
    while True:
        try:
            return _compose(sources, overrides), problems
        except ConfigError as error:
            problems += error.problems
            wrong = _culprits(error.__cause__, overrides)
            if not wrong:
                raise ConfigError(problems) from error
            # Hydra tells of one at a time: without it, the next one shows.
            overrides = [text for text in overrides if text not in wrong]


def _compose(sources: Sources, overrides: list[str]) -> DictConfig:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    register_host_resolver()
    file = sources.file
    try:
        with initialize_config_dir(config_dir=str(file.parent), version_base=None):
            config = hydra_compose(file.stem, overrides=overrides, return_hydra_config=True)
            HydraConfig.instance().set_config(config)  # so that ${hydra:...} resolves later
    except RecursionError as error:
        deepest = max(overrides, key=lambda text: text.count("[") + text.count("{"), default="")
        key = deepest.lstrip("+~").partition("=")[0]
        raise ConfigError(Problem(key, "nests too deep", OVERRIDE)) from error
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError) as error:
        _translate(error, sources)  # Hydra raises the last two for some odd overrides
    OmegaConf.set_struct(config, False)
    return config


def _translate(error: Exception, sources: Sources) -> NoReturn:
    """Raises a ConfigError for what Hydra or OmegaConf found."""
    from hydra.errors import MissingConfigException, OverrideParseException
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError, GrammarParseError

    if isinstance(error, MissingConfigException):
        missing = _missing_group(error.missing_cfg_file, error.options, sources.file)
        raise ConfigError(missing) from error
    if isinstance(error, OverrideParseException):
        raise ConfigError(_unreadable(error.override, str(error))) from error
    cause = error.__cause__
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)):
        key = str(cause.full_key)
        raise ConfigError(Problem(key, _not_there(key, sources), OVERRIDE)) from error
    if isinstance(cause, GrammarParseError):
        if found := unreadable_interpolations(sources):
            raise ConfigError(found) from error
        key, message = str(cause.full_key), str(cause).partition("\n")[0]
        message += interpolation_hint(message)
        raise ConfigError(Problem(key, message, sources.place(key))) from error
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
        key = message.split("'")[1].partition("=")[0].lstrip("+")
        message = (
            f"Hydra takes a comma for a sweep: `{key}=[a,b]` is a list, `{key}='a,b'` a text, and "
            "-m starts a run for each"
        )
        raise ConfigError(Problem(key, message, OVERRIDE)) from error
    raise ConfigError(Problem("", message, short_path(sources.file))) from error


def _culprits(error: BaseException | None, overrides: Sequence[str]) -> list[str]:
    """The overrides that an error of Hydra is about. None where others may follow from it: what is
    in a config group that is not there, nobody knows."""
    from hydra.errors import MissingConfigException, OverrideParseException

    if isinstance(error, OverrideParseException):
        return [text for text in overrides if text == error.override]
    named = _NAMED.search(str(error))
    if isinstance(error, MissingConfigException) or named is None:
        return []
    key = named["key"].lstrip("+~")
    return [
        text
        for text in overrides
        if (override := parse_override(text)) is not None and override.key == key
    ]


def _missing_group(missing: str | None, options: Iterable[str] | None, file: Path) -> Problem:
    group, _, option = str(missing).rpartition("/")
    names = sorted(options or ())
    listed = f"; there are {', '.join(names)}" if names else ""
    where = short_path(file.parent / group) if group else short_path(file.parent)
    message = f"no {option}.yaml in {where}{listed}{did_you_mean(option, names)}"
    return Problem(group.replace("/", "."), message)


def _unreadable(override: str, message: str) -> Problem:
    parsed = parse_override(override)
    if parsed is None or parsed.value is None:
        return Problem(override, "expected key=value", OVERRIDE)
    complaint = message.splitlines()[0]
    if complaint.startswith("LexerNoViableAlt"):  # says nothing but its name
        complaint = "a character that has a meaning to Hydra"
    advice = f"quote it: '{parsed.key}=\"…\"'"
    return Problem(parsed.key, f"Hydra cannot read this value ({complaint}); {advice}", OVERRIDE)


def _not_there(key: str, sources: Sources) -> str:
    name = key.rpartition(".")[2].replace("-", "_")
    if key.startswith("train.") and (reason := why_unsupported(name) or why_unused(name)):
        return f"cannot be given: {reason}"
    # Hydra names the first part of a key that is missing.
    typed = [o.key for text in sources.overrides if (o := parse_override(text)) is not None]
    whole = next((typed_key for typed_key in typed if typed_key.startswith(f"{key}.")), key)
    leaf = whole.rpartition(".")[2].replace("-", "_")
    if not key.startswith("train.") and (argument := key_of_argument(sources, leaf)):
        return f"no such key; did you mean {argument!r}?"
    # Another's program may know arguments that we do not; there is nothing to add elsewhere.
    adds = key.startswith("train.") and _is_external(sources)
    more = f" (`+{key}=...` adds a new one)" if adds else ""
    return f"no such key{did_you_mean_key(key)}{more}"


def _is_external(sources: Sources) -> bool:
    program = sources.texts.get("experiment.task.entrypoint", "${")
    return "${" not in program and find_program(program).resolve() != OWN_PROGRAM
