"""Completion of command lines in bash, zsh and fish.

``flagscale completion SHELL`` prints a script. On a Tab it calls ``flagscale __complete SHELL …``,
which prints a line ``value<TAB>description`` per candidate. Keys, their descriptions and choices
come from the committed JSON schema, runs from the registry's files: neither Hydra nor torch is
imported.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flagscale.commands.program import PROGRAM_ACTIONS, split_program
from flagscale.config import schema, schemas
from flagscale.config.actions import ACTIONS, actions_by_command
from flagscale.config.arguments.spec.registry import arguments

SHELLS = ("bash", "zsh", "fish")
COMPLETE = "__complete"
"""Command that the scripts call."""
_GROUPS = ("comm", "bench")
_MAX_RUNS = 50
_MAX_DESCRIPTION = 80
_YAML = (".yaml", ".yml")
_FILE_KEY = re.compile(r".*(_path|_dir|file|dir|checkpoint)|load|save|python|entrypoint")
_SWITCH_VALUES = ("true", "false")
_BASH_SPECIAL = re.compile(r"([^\w@%+=:,./~\-\[\]])")


class Candidate(NamedTuple):
    """Completion of a word. One that ends in ``=``, ``.`` or ``/`` is followed by no space."""

    value: str
    text: str = ""
    """Description in one line."""


Commands = Mapping[str, Sequence[Candidate]]
"""Groups of commands, such as ``comm``, with their commands."""


def script(shell: str) -> str:
    """Return the script that a shell has to source."""
    return Path(__file__).with_suffix(f".{shell}").read_text("utf-8")


def print_candidates(
    words: Sequence[str], parser: argparse.ArgumentParser, read_groups: Callable[[], Commands]
) -> int:
    """Print the candidates for ``__complete SHELL …``. Prints nothing if anything goes wrong,
    because the user is typing.

    Args:
        words: For bash, the line up to the cursor and the characters that separate its words; for
            other shells, the words after ``flagscale``, the last of which is completed.
        parser: Parser of the ``flagscale`` command.
        read_groups: Returns the commands of groups that the parser does not have.
    """
    try:
        shell, *rest = words
        cut = 0
        if shell == "bash":
            line, breaks = rest
            rest = _split_line(line)[1:]
            cut = _typed_before(rest[-1], breaks)
        candidates = complete(rest, parser, read_groups)
        for candidate in candidates:
            value = candidate.value[cut:]
            if shell == "bash":
                value = _BASH_SPECIAL.sub(r"\\\1", value)
            print(f"{value}\t{_shorten(candidate.text)}")
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return 0
    return 0


def complete(
    words: Sequence[str], parser: argparse.ArgumentParser, read_groups: Callable[[], Commands]
) -> list[Candidate]:
    """Return the candidates for the last word of a command line without the program's name."""
    *before, current = words
    matching = (
        candidate
        for candidate in _find_candidates(before, current, parser, read_groups)
        if candidate.value.startswith(current)
    )
    return list({candidate.value: candidate for candidate in matching}.values())


def _find_candidates(
    before: Sequence[str],
    current: str,
    parser: argparse.ArgumentParser,
    read_groups: Callable[[], Commands],
) -> Iterable[Candidate]:
    commands = _subparsers(parser)
    if not before:
        return _command_candidates(commands)
    name, *words = before
    if name in _GROUPS:
        return _paths(current) if words else read_groups()[name]
    command: argparse.ArgumentParser = commands.choices[name]
    if name in PROGRAM_ACTIONS and (split_program(words)[1] or "--" in words):
        return _paths(current)
    return _word_candidates(_Context(name, command, words), current)


def _word_candidates(context: _Context, current: str) -> Iterable[Candidate]:
    """Return the candidates for an option, the value of one, or a positional word."""
    options = context.options
    previous = context.words[-1] if context.words else ""
    if _takes_value(options.get(previous)):
        return _option_values(options[previous], current, context)
    flag, equals, value = current.partition("=")
    if equals and _takes_value(options.get(flag)):
        values = _option_values(options[flag], value, context)
        return (Candidate(f"{flag}={v.value}", v.text) for v in values)
    if current.startswith("-"):
        return _option_candidates(context.parser)
    return _positional_candidates(context, current)


class _Context(NamedTuple):
    """Command line before the completed word, without the command's name."""

    name: str
    parser: argparse.ArgumentParser
    words: Sequence[str]

    @property
    def options(self) -> dict[str, argparse.Action]:
        return {flag: action for action in self.parser._actions for flag in action.option_strings}

    @property
    def positional(self) -> list[str]:
        """Words that are neither options nor their values."""
        options = self.options
        return [
            word
            for previous, word in zip(("", *self.words), self.words, strict=False)
            if not word.startswith("-") and not _takes_value(options.get(previous))
        ]

    @property
    def config(self) -> Path | None:
        """YAML of the command line; None if it has none."""
        paths = (path for word in self.positional for path in (Path(word), Path(f"{word}.yaml")))
        return next((path for path in paths if path.suffix in _YAML and path.is_file()), None)


# -- commands and options --------------------------------------------------------------------------


def _subparsers(parser: argparse.ArgumentParser) -> Any:
    return next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))


def _command_candidates(commands: Any) -> Iterator[Candidate]:
    for action in commands._choices_actions:
        yield Candidate(action.dest, action.help or "")


def _option_candidates(parser: argparse.ArgumentParser) -> Iterator[Candidate]:
    for action in parser._actions:
        long_flags = [flag for flag in action.option_strings if flag.startswith("--")]
        # Other long ones are names of other programs.
        for flag in (long_flags or action.option_strings)[:1]:
            yield Candidate(flag, action.help or "")


def _takes_value(action: argparse.Action | None) -> bool:
    return action is not None and action.nargs is None


def _option_values(action: argparse.Action, current: str, context: _Context) -> Iterable[Candidate]:
    """Return the candidates for the value of an option."""
    if action.choices:
        return (Candidate(str(choice)) for choice in action.choices)
    if action.dest in _OPTION_VALUES:
        return _OPTION_VALUES[action.dest](current, context)
    is_path = action.type is Path or action.dest.endswith(("_dir", "_path"))
    return _paths(current) if is_path else ()


def _new_models() -> Iterator[Candidate]:
    from flagscale.commands.new_experiment import model_names

    yield from map(Candidate, model_names())


# -- positional words ------------------------------------------------------------------------------


def _positional_candidates(context: _Context, current: str) -> Iterable[Candidate]:
    """Return the candidates for a positional word, by the names of the command's arguments."""
    positional = context.positional
    arguments_of_command = [a for a in context.parser._actions if not a.option_strings]
    names = [action.dest for action in arguments_of_command]
    is_override = bool(positional) or re.match(r"[+~]*(experiment|train)[.]", current) is not None
    if "overrides" in names and is_override:
        model_config = _example_config(positional[0]) if positional else None
        return _override_candidates(current, model_config or context.config)
    for action in arguments_of_command:
        if action.choices:
            return map(Candidate, map(str, action.choices)) if not positional else ()
        if action.dest in _POSITIONAL:
            return _POSITIONAL[action.dest](current, context)
    return _paths(current)


def _config_candidates(current: str, context: _Context) -> Iterable[Candidate]:
    if context.name in PROGRAM_ACTIONS:
        return _paths(current, (*_YAML, ".py"))
    row = actions_by_command().get(context.name)
    takes_runs = row is not None and row.purpose == "find"
    return (*(_runs() if takes_runs else ()), *_paths(current, _YAML))


def _model_candidates(current: str, _context: _Context) -> Iterable[Candidate]:
    models = sorted(path.parts[-3] for path in Path("examples").glob("*/conf/train.yaml"))
    return (*map(Candidate, models), *_paths(current, _YAML))


def _run_candidates(current: str, _context: _Context) -> Iterable[Candidate]:
    return (*_runs(), *_paths(current, _YAML))


def _example_config(model: str) -> Path | None:
    path = Path("examples", model, "conf", "train.yaml")
    return path if path.is_file() else None


def _paths(
    current: str, suffixes: Sequence[str] = (), *, directories: bool = False
) -> Iterator[Candidate]:
    """Yield directories, and files with one of the suffixes (all without suffixes)."""
    folder, _, start = current.rpartition("/")
    prefix = f"{folder}/" if "/" in current else ""
    with os.scandir(os.path.expanduser(prefix) or ".") as entries:  # noqa: PTH111 - keeps "./"
        found = sorted((entry.name, entry.is_dir()) for entry in entries)
    for name, is_directory in found:
        if name.startswith(".") and not start.startswith("."):
            continue
        if is_directory:
            yield Candidate(f"{prefix}{name}/")
        elif not directories and (not suffixes or name.endswith(tuple(suffixes))):
            yield Candidate(f"{prefix}{name}")


# -- keys ------------------------------------------------------------------------------------------


def _override_candidates(current: str, config: Path | None) -> Iterable[Candidate]:
    key, equals, value = current.partition("=")
    marks = key[: len(key) - len(key.lstrip("+~"))]
    name = key[len(marks) :]
    if equals:
        values = _values_of(name, value, config)
        return (Candidate(f"{key}={v.value}", v.text) for v in values)
    suffix = "" if marks == "~" else "="
    groups = [Candidate(group, "another file") for group in _config_groups(config)]
    return (
        Candidate(f"{marks}{c.value}{'' if c.value.endswith('.') else suffix}", c.text)
        for c in (*groups, *_key_candidates(name))
    )


def _key_candidates(current: str) -> Iterator[Candidate]:
    """Yield the keys of the section that is being typed, and its subsections, which end in a
    dot.
    """
    prefix = current[: current.rfind(".") + 1]
    tree: Any = _key_tree()
    for part in prefix.split(".")[:-1]:
        tree = tree.get(part, {}).get("properties", {})
    for name, content in tree.items():
        is_section = "properties" in content
        yield Candidate(
            f"{prefix}{name}{'.' if is_section else ''}", content.get("description", "")
        )


def _key_tree() -> dict[str, Any]:
    """Return the properties of the schema, with each argument in its usual section of ``train``."""
    content = json.loads((schemas.DIRECTORY / schemas.EXPERIMENT_FILE).read_bytes())
    properties = {**content["properties"]}
    hidden_names = ("defaults", "hydra", *schema.documented_fields(schema.Options))
    for name in (*hidden_names, *schema.SPECIFIC_SECTIONS):
        properties.pop(name, None)
    keys = content["definitions"]["arguments"]["properties"]
    sections: dict[str, Any] = {name: {"properties": {}} for name in schema.SECTIONS}
    for name, argument in arguments().items():
        sections[argument.section]["properties"][name] = keys[name]
    description = "Arguments of the training program."
    properties["train"] = {"properties": sections, "description": description}
    return properties


def _values_of(key: str, value: str, config: Path | None) -> Iterable[Candidate]:
    """Return the candidates for the value of a key, or the files of a config group."""
    groups = _config_groups(config)
    if key in groups:
        return map(Candidate, groups[key])
    content: Any = {"properties": _key_tree()}
    *sections, name = key.split(".")
    for part in sections:
        content = content.get("properties", {}).get(part, {})
    leaf = content.get("properties", {}).get(name)
    if leaf is None and sections[:1] == ["train"]:
        # Sections of arguments may have any names.
        leaf = next(_find_argument(name), None)
    values = list(_choices(leaf or {}))
    if not values and _FILE_KEY.fullmatch(name):
        return _paths(value)
    return map(Candidate, values)


def _find_argument(name: str) -> Iterator[Mapping[str, Any]]:
    for section in _key_tree()["train"]["properties"].values():
        if name in section["properties"]:
            yield section["properties"][name]


def _choices(content: Mapping[str, Any]) -> Iterator[str]:
    for form in content.get("anyOf", ()):
        if form.get("type") == "boolean":
            yield from _SWITCH_VALUES
        yield from (str(choice) for choice in form.get("enum", ()))
        items = form.get("items")
        if items is not None:
            yield from _choices(items)


def _config_groups(config: Path | None) -> dict[str, list[str]]:
    """Return the config groups next to a YAML, with the names of their files."""
    if config is None:
        return {}
    groups = (folder for folder in sorted(config.parent.iterdir()) if folder.is_dir())
    files = {folder.name: sorted(p.stem for p in folder.glob("*.yaml")) for folder in groups}
    return {name: stems for name, stems in files.items() if stems}


# -- runs and hosts --------------------------------------------------------------------------------


def _read_runs() -> Iterator[dict[str, Any]]:
    """Yield the records of the registered runs, newest first."""
    from flagscale.launcher.layout import registry_directory

    for path in sorted(registry_directory().glob("*.json"), reverse=True)[:_MAX_RUNS]:
        try:
            record = json.loads(path.read_bytes())
            yield {**record["state"], "ended": record["ended"]}
        except (OSError, ValueError, LookupError, TypeError):
            continue


def _runs() -> Iterator[Candidate]:
    for run in _read_runs():
        phase = run["ended"]["phase"] if run["ended"] else "not known to have ended"
        yield Candidate(run["run_id"], f"{run['name']}, {phase}, {run['exp_dir']}")


def _known_hosts(context: _Context) -> Iterable[str]:
    """Return the hosts of the run or of the YAML on the command line."""
    for run in _read_runs():
        directories = [str(Path(word).absolute()) for word in context.positional]
        if run["exp_dir"] in directories or any(
            run["run_id"].startswith(word) for word in context.positional
        ):
            return [host["name"] for host in run["hosts"]]
    return _hosts_of_config(context.config) if context.config is not None else ()


def _hosts_of_config(config: Path) -> list[str]:
    """Return the hosts of a YAML's hostfile or list of hosts, as far as it names them itself."""
    import yaml

    from flagscale.errors import ConfigError
    from flagscale.hosts.hostfile import parse_host_list, parse_hostfile

    runner = yaml.safe_load(config.read_text("utf-8"))["experiment"].get("runner") or {}
    try:
        if runner.get("hostfile"):
            file = Path(os.path.expanduser(runner["hostfile"]))  # noqa: PTH111 - as the launcher
            return [host.name for host in parse_hostfile(file.read_text("utf-8"))]
        return [host.name for host in parse_host_list(runner.get("hosts") or ())]
    except ConfigError:
        return []


def _host_lists(current: str) -> Iterator[Candidate]:
    """Yield the hosts of the user's SSH configuration, after those that are typed already."""
    typed, comma, _ = current.rpartition(",")
    file = Path.home() / ".ssh" / "config"
    for line in file.read_text("utf-8").splitlines():
        words = line.split()
        if words[:1] in (["Host"], ["host"]):
            yield from (
                Candidate(f"{typed}{comma}{w}") for w in words[1:] if not set(w) & set("*?!")
            )


def _config_names() -> list[Candidate]:
    return [Candidate(path.stem) for path in sorted(Path().glob("*.yaml"))]


_POSITIONAL: Mapping[str, Callable[[str, _Context], Iterable[Candidate]]] = {
    "config": _config_candidates,
    "model": _model_candidates,
    "run": _run_candidates,
    "runs": _run_candidates,
    "key": lambda current, _context: _key_candidates(current),
    "directory": lambda current, _context: _paths(current, directories=True),
}
"""Functions that return the candidates for an argument, by its destination."""
_OPTION_VALUES: Mapping[str, Callable[[str, _Context], Iterable[Candidate]]] = {
    "action": lambda _current, _context: [Candidate(a.name, a.help) for a in ACTIONS.values()],
    "nproc": lambda _current, _context: [Candidate("auto", "one process per device")],
    "host": lambda _current, context: map(Candidate, _known_hosts(context)),
    "hosts": lambda current, _context: _host_lists(current),
    "model": lambda current, _context: (*_new_models(), *_paths(current, directories=True)),
    "env": lambda _current, _context: map(Candidate, sorted(os.environ)),
    "config": lambda current, _context: _paths(current, _YAML),
    "config_name": lambda _current, _context: _config_names(),
}
"""Functions that return the candidates for the value of an option, by its destination."""


# -- shells ----------------------------------------------------------------------------------------


def _split_line(line: str) -> list[str]:
    """Return the words of an unfinished line; the last one is empty after a space."""
    for quote in ("", '"', "'"):
        try:
            words = shlex.split(line + quote)
        except ValueError:
            continue
        is_after_space = not quote and line[-1:].isspace() and line[-2:-1] != "\\"
        return [*words, ""] if is_after_space or len(words) < 2 else words
    return ["flagscale", ""]


def _typed_before(word: str, breaks: str) -> int:
    """Return the length of the part of a word that bash takes for earlier words."""
    # Others separate words only where the word itself would have ended.
    separators = [character for character in "=:@," if character in breaks]
    return max((word.rfind(character) for character in separators), default=-1) + 1


def _shorten(text: str) -> str:
    """Return the beginning of a description, in one line."""
    line = " ".join(text.split()).replace("`", "")
    line = re.split(r"(?<=[.!?]) ", line, maxsplit=1)[0].rstrip(".")
    return line if len(line) <= _MAX_DESCRIPTION else line[: _MAX_DESCRIPTION - 2] + " …"
