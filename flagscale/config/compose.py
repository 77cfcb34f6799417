"""Composition of a YAML, its config groups and overrides into one configuration, by Hydra.

Called by ``config.load`` and ``config.show`` with the :class:`~flagscale.config.sources.Sources` of
a configuration. Hydra is imported only after the files have been checked, and its errors are
converted to one ConfigError.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import yaml

from flagscale.config.arguments.compat.names import why_unsupported, why_unused
from flagscale.config.arguments.spec.argument import SettingContext
from flagscale.config.arguments.spec.values import did_you_mean
from flagscale.config.experiment_reader import find_program
from flagscale.config.interpolation import (
    find_unreadable_interpolations,
    interpolation_hint,
    register_resolvers,
)
from flagscale.config.overrides import (
    Override,
    complete_key,
    did_you_mean_key,
    did_you_mean_short_name,
    normalize_overrides,
    parse_override,
)
from flagscale.config.runners import UNSTATED_HOSTS
from flagscale.config.schema import OWN_PROGRAM
from flagscale.config.sources import OVERRIDE, Sources, key_of_argument
from flagscale.config.yaml_file import short_path
from flagscale.errors import ConfigError, Problem

if TYPE_CHECKING:
    from omegaconf import DictConfig


_HYDRA_LOCK = threading.RLock()
_APPEND_ERROR = re.compile(r"Could not append to config\. An item is already at '([^']*)'")
_QUOTED_KEY = re.compile(r"'(?P<key>[^'=]*)[^']*'")


def config_file(config_path: Path, config_name: str) -> Path:
    """Return the absolute path of the YAML with this name in a directory.

    Raises:
        ConfigError: if there is none, with the files that the directory has. The message names no
            option, because the caller may have got the directory from an option or a default.
    """
    directory = config_path.absolute()
    if not directory.is_dir():
        raise ConfigError(f"no directory {short_path(directory)}")
    name = config_name.removesuffix(".yaml").removesuffix(".yml")
    file = directory / f"{name}.yaml"
    if file.is_file():
        return file
    if (directory / config_name).is_dir():
        folder = short_path(directory / config_name)
        files = [f"{folder}/{found}.yaml" for found in _yaml_files(directory / config_name)]
        raise ConfigError(
            f"{folder} is a directory: name a YAML file",
            hint=f"it has {', '.join(files)}" if files else "it has none",
        )
    yaml_names = _yaml_files(file.parent)
    contents = f"it has {', '.join(yaml_names)}" if yaml_names else "it has no YAML files"
    if file.with_suffix(".yml").is_file():
        contents = f"{name}.yml must be called {name}.yaml"
    location = "the current directory" if directory == Path.cwd() else short_path(directory)
    raise ConfigError(f"no {name}.yaml in {location}; {contents}{did_you_mean(name, yaml_names)}")


def _yaml_files(directory: Path) -> list[str]:
    """Return the names, without suffix, of the YAML files in a directory that are not hidden."""
    files = directory.glob("*.yaml") if directory.is_dir() else ()
    return sorted(path.stem for path in files if not path.name.startswith("."))


def compose(sources: Sources) -> DictConfig:
    """Return the composed configuration, interpolations unresolved, without the ``hydra`` section.

    Overrides of keys that the schema has need no ``+``.

    Raises:
        ConfigError: for an unknown config group, and with every override that has an unknown key or
            cannot be parsed.
    """
    config, problems = compose_valid_overrides(sources)
    if problems:
        raise ConfigError(problems)
    del config["hydra"]
    return config


@contextmanager
def exclusive_hydra() -> Iterator[None]:
    """Hold Hydra and OmegaConf for one thread, and restore their state afterwards.

    Both keep their state in globals of the process. The block has them for itself; afterwards they
    are as before, so that a program that uses Hydra itself is not disturbed.
    """
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf.basecontainer import BaseContainer

    with _HYDRA_LOCK:
        hydra, config = GlobalHydra.instance().hydra, HydraConfig.instance().cfg
        resolvers = dict(BaseContainer._resolvers)
        GlobalHydra.instance().hydra = None
        try:
            yield
        finally:
            # By now instance() may return other objects, so both are looked up again.
            GlobalHydra.instance().hydra, HydraConfig.instance().cfg = hydra, config
            BaseContainer._resolvers.clear()
            BaseContainer._resolvers.update(resolvers)


def compose_valid_overrides(sources: Sources) -> tuple[DictConfig, list[Problem]]:
    """Compose a configuration without those overrides that Hydra rejects.

    Returns:
        The configuration with its ``hydra`` section, and the problems of the rejected overrides.

    Raises:
        ConfigError: if nothing can be composed.
    """
    _reject_spaced_overrides(sources.overrides)
    overrides = normalize_overrides(sources.relocated)
    problems: list[Problem] = []
    while True:
        try:
            return _compose(sources, overrides), problems
        except ConfigError as error:
            problems += error.problems
            rejected = _find_rejected_overrides(error.__cause__, overrides)
            if not rejected:
                raise ConfigError(problems) from error
            # Hydra reports one override at a time. Without this one it reports the next.
            overrides = [text for text in overrides if text not in rejected]


def _reject_spaced_overrides(words: Sequence[str]) -> None:
    """Raise an error for an override with spaces, which a shell splits: ``lr = 1e-4``."""
    if "=" in words:
        index = words.index("=")
        key, value = "".join(words[:index][-1:]), "".join(words[index + 1 :][:1])
        if not value or "=" in value:  # the next override
            value = "VALUE"
        message = f"write {key}={value} without spaces around ="
        raise ConfigError(Problem(key, message, OVERRIDE))


def _compose(sources: Sources, overrides: list[str]) -> DictConfig:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    register_resolvers()
    file = sources.file
    try:
        with initialize_config_dir(config_dir=str(file.parent), version_base=None):
            config = hydra_compose(file.stem, overrides=overrides, return_hydra_config=True)
            HydraConfig.instance().set_config(config)  # so that ${hydra:...} resolves later
    except RecursionError as error:
        deepest_override = max(
            overrides, key=lambda text: text.count("[") + text.count("{"), default=""
        )
        key = deepest_override.lstrip("+~").partition("=")[0]
        raise ConfigError(Problem(key, "nests too deep", OVERRIDE)) from error
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError) as error:
        _raise_config_error(error, sources)  # Hydra raises the last two for some odd overrides
    OmegaConf.set_struct(config, False)
    return config


def _raise_config_error(error: Exception, sources: Sources) -> NoReturn:
    """Raise a ConfigError for an error of Hydra or OmegaConf."""
    from hydra.errors import MissingConfigException, OverrideParseException
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError, GrammarParseError

    if isinstance(error, MissingConfigException):
        problem = _missing_group_problem(error.missing_cfg_file, error.options, sources.file)
        raise ConfigError(problem) from error
    if isinstance(error, OverrideParseException):
        raise ConfigError(_unreadable_override_problem(error.override, str(error))) from error
    cause = error.__cause__
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)):
        key = str(cause.full_key)
        raise ConfigError(Problem(key, _explain_missing_key(key, sources), OVERRIDE)) from error
    if isinstance(cause, GrammarParseError):
        if problems := find_unreadable_interpolations(sources):
            raise ConfigError(problems) from error
        key, message = str(cause.full_key), str(cause).partition("\n")[0]
        message += interpolation_hint(message)
        raise ConfigError(Problem(key, message, sources.location(key))) from error
    if isinstance(error, TypeError):
        message = f"Hydra cannot use these overrides: {error}; a config group takes names: train=8b"
        raise ConfigError(Problem("", message, OVERRIDE)) from error
    message = " ".join(str(error).split())
    append_error = _APPEND_ERROR.match(message)
    if append_error is not None:
        raise ConfigError(
            Problem(append_error[1], "is set already; leave out the +", OVERRIDE)
        ) from error
    if message.startswith("Ambiguous value for argument"):
        key = message.split("'")[1].partition("=")[0].lstrip("+")
        message = (
            f"Hydra takes a comma for a sweep: `{key}=[a,b]` is a list, `{key}='a,b'` a text, and "
            "-m starts a run for each"
        )
        raise ConfigError(Problem(key, message, OVERRIDE)) from error
    raise ConfigError(Problem("", message, short_path(sources.file))) from error


def _find_rejected_overrides(error: BaseException | None, overrides: Sequence[str]) -> list[str]:
    """Return the overrides that an error of Hydra is about.

    Empty if a config group is missing: the keys of a missing group are unknown, so other errors may
    only follow from it.
    """
    from hydra.errors import MissingConfigException, OverrideParseException

    if isinstance(error, OverrideParseException):
        return [text for text in overrides if text == error.override]
    quoted_key = _QUOTED_KEY.search(str(error))
    if isinstance(error, MissingConfigException) or quoted_key is None:
        return []
    key = quoted_key["key"].lstrip("+~")
    return [
        text
        for text in overrides
        if (override := parse_override(text)) is not None and override.key == key
    ]


def _missing_group_problem(
    missing_file: str | None, options: Iterable[str] | None, file: Path
) -> Problem:
    group, _, option = str(missing_file).rpartition("/")
    names = sorted(options or ())
    available = f"; there are {', '.join(names)}" if names else ""
    location = short_path(file.parent / group) if group else short_path(file.parent)
    message = f"no {option}.yaml in {location}{available}{did_you_mean(option, names)}"
    return Problem(group.replace("/", "."), message)


def _unreadable_override_problem(override: str, message: str) -> Problem:
    parsed = parse_override(override)
    if parsed is None or parsed.value is None:
        return Problem(override, "expected key=value", OVERRIDE)
    error_line = message.splitlines()[0]
    if error_line.startswith("LexerNoViableAlt"):  # has no explanation
        error_line = "a character that has a meaning to Hydra"
    advice = f"quote it: '{parsed.key}=\"…\"'"
    return Problem(parsed.key, f"Hydra cannot read this value ({error_line}); {advice}", OVERRIDE)


def _explain_missing_key(key: str, sources: Sources) -> str:
    from flagscale.config.arguments.compat.trainer_names import replacement_of

    typed_override = _override_of(key, sources)
    name = typed_override.key.rpartition(".")[2].replace("-", "_")
    if own_key := complete_key(typed_override.key):
        return f"no such key; did you mean {own_key!r}?"
    context = SettingContext(_argument_texts(sources), _stated_ranks(sources), is_override=True)
    if answer := replacement_of(name, typed_override.value, context):
        return answer
    if key.startswith("train.") and (reason := why_unsupported(name) or why_unused(name)):
        return f"cannot be given: {reason}"
    is_in_section = key.startswith("train.") and key.count(".") > 1
    if not is_in_section and (argument := key_of_argument(sources, name)):
        if sources.texts.get("experiment.task.type") == "command":
            return "no such key; a command takes no arguments of training"
        return f"no such key; did you mean {argument!r}?"
    # An external program may have arguments of its own, so only those may be added.
    may_add_key = key.startswith("train.") and _is_external(sources)
    hint = f" (`+{key}=...` adds a new one)" if may_add_key else ""
    is_short = "." not in typed_override.key
    suggestion = did_you_mean_short_name(key) if is_short else did_you_mean_key(key)
    return f"no such key{suggestion}{hint}"


def _argument_texts(sources: Sources) -> dict[str, str]:
    """Return the texts of the arguments of all files and overrides, by name."""
    return {
        key.rpartition(".")[2]: text
        for key, text in sources.texts.items()
        if key.startswith("train.")
    }


def _stated_ranks(sources: Sources) -> int | None:
    """Return the number of ranks, if the files and overrides state it without a hostfile."""
    runner = "experiment.runner."
    texts = sources.texts
    per_host = texts.get(f"{runner}nproc_per_node", "")
    hosts = texts.get(f"{runner}nnodes", "1")
    names_hosts = any(f"{runner}{name}" in sources.locations for name in ("hostfile", "hosts"))
    is_elsewhere = names_hosts or texts.get(f"{runner}type") in UNSTATED_HOSTS
    if is_elsewhere or not (per_host.isdecimal() and hosts.isdecimal()):
        return None
    return int(per_host) * int(hosts)


def _override_of(key: str, sources: Sources) -> Override:
    """Return the typed override of a key. Hydra names the first part of a key that is missing."""
    overrides = [o for text in sources.overrides if (o := parse_override(text)) is not None]
    return next(
        (o for o in overrides if o.key == key or o.key.startswith(f"{key}.")),
        Override("", key, None),
    )


def _is_external(sources: Sources) -> bool:
    program = sources.texts.get("experiment.task.entrypoint", "${")
    return "${" not in program and find_program(program).resolve() != OWN_PROGRAM
