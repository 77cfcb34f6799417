"""Reading ``experiment``: task, runner, environment, commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flagscale.config import schema
from flagscale.config.arguments.spec.argument import Argument
from flagscale.config.arguments.spec.values import (
    MAX_NAME,
    byte_length,
    convert,
    did_you_mean,
    format_value,
    why_unfit,
)
from flagscale.config.interpolation import without_references
from flagscale.config.overrides import SUBSECTIONS, subsections_of
from flagscale.config.reader import SectionReader, absolute_path
from flagscale.config.runners import RUNNERS
from flagscale.config.secrets import is_secret
from flagscale.config.slurm_reader import check_slurm, read_slurm
from flagscale.config.torchrun import PASSED_ON, SET_BY_LAUNCHER
from flagscale.config.yaml_file import short_path

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_STREAMS = re.compile(r"[0-3]|[0-9]+:[0-3](?:,[0-9]+:[0-3])*")
_SCHEDULERS = ("kubernetes", "cloud")
_SECTIONS = ("notify", "slurm")
# FlagScale's program for unlike devices; there is one for all here.
_SAME = (Path("flagscale/train/hetero/train_gpt.py"),)
_SCOPES = ("device_type_specific", "node_specific")


def read_experiment(reader: SectionReader, data: Mapping[Any, Any]) -> schema.Experiment:
    """Read the section ``experiment``, without the arguments of the training program.

    A name or a directory that cannot be read is reported and replaced, so that the rest can be
    checked.
    """
    prefix = "experiment."
    section = reader.mapping(data, "experiment")
    settings = {key: value for key, value in section.items() if key not in (*SUBSECTIONS, "envs")}
    elsewhere = {
        key: f"{prefix}{subsection}.{key}"
        for subsection, kind in SUBSECTIONS.items()
        for key in schema.documented(kind)
    }
    fields = reader.fields(
        schema.Experiment, settings, prefix, beside=subsections_of(""), elsewhere=elsewhere
    )
    if complaint := _unfit_name(fields.get("name", "")):
        reader.problem("experiment.exp_name", complaint)
    task = read_task(reader, reader.mapping(section, "task", prefix))
    runner = read_runner(reader, reader.mapping(section, "runner", prefix))
    check_command(reader, task, runner)
    envs = read_environments(reader, reader.mapping(section, "envs", prefix))
    cmds = read_commands(reader, reader.mapping(section, "cmds", prefix))
    return schema.Experiment(
        name=fields.get("name", ""),
        exp_dir=fields.get("exp_dir", Path.cwd()),
        task=task,
        runner=runner,
        envs=envs,
        cmds=cmds,
        config_file=reader.sources.file,
        overrides=reader.sources.overrides,
        resolved=data,
        sources=reader.sources.places,
        idle=tuple(reader.idle),
    )


def _unfit_name(name: str) -> str | None:
    """Why a name cannot be shown in one line of a terminal, nor be a file's."""
    odd = next((character for character in name if not character.isprintable()), None)
    if odd is not None:
        return f"expected printable text, found the character {odd!a}"
    if byte_length(name) > MAX_NAME:
        return f"is {byte_length(name):,} bytes long; expected at most {MAX_NAME}"
    return None


def read_task(reader: SectionReader, data: Mapping[Any, Any]) -> schema.Task:
    """``experiment.task``."""
    data = _split(reader, data)
    fields = reader.fields(schema.Task, data, "experiment.task.")
    if fields.get("type") == "command":
        return _read_command(reader, fields)
    if fields.get("command"):
        reader.problem("experiment.task.command", "needs `type: command`")
    key = "experiment.task.entrypoint"
    if "entrypoint" in fields:
        fields["entrypoint"] = find_program(reader.text(key, data["entrypoint"]))
    entrypoint: Path = fields.get("entrypoint", schema.OWN_PROGRAM)
    if not entrypoint.is_file():
        reader.problem(key, f"no file {short_path(entrypoint)}{_elsewhere(entrypoint)}")
    elif entrypoint.suffix != ".py":
        reader.problem(key, f"expected a Python program, *.py, found {short_path(entrypoint)}")
    external = entrypoint.resolve() != schema.OWN_PROGRAM
    return schema.Task(
        **fields, external=external, packages=_packages(entrypoint) if external else ()
    )


def _split(reader: SectionReader, data: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """The section with a command that is a text in words."""
    text = data.get("command")
    if not isinstance(text, str):
        return data
    try:
        return {**data, "command": shlex.split(text)}
    except ValueError as error:
        reader.problem("experiment.task.command", f"{format_value(text)} cannot be split: {error}")
        return {**data, "command": None, "type": None}


def _read_command(reader: SectionReader, fields: dict[str, Any]) -> schema.Task:
    """The task that runs a command. ``entrypoint`` is then the file of a Python program of this
    machine's, if it is one."""
    key = "experiment.task.command"
    fields.pop("entrypoint", None)
    words = fields.get("command", ())
    if not any(words[:1]):
        if not any(problem.key == key for problem in reader.problems):
            reader.problem(key, "is required with `type: command`: the program and its arguments")
        return schema.Task(**fields, external=True)
    first, *arguments = words
    for complaint in filter(None, map(why_unfit, words)):
        reader.problem(key, complaint)
    for name, value in _named(words):
        if is_secret(name, value):
            message = "looks like a secret, which a script and the process list would show; give "
            reader.problem(key, f"{name or 'a word'} {message}it in experiment.envs")
    if not first.endswith(".py"):
        return schema.Task(**fields, external=True)
    program = find_program(first)
    if not program.is_file():
        reader.problem(key, f"no file {short_path(program)}")
    fields["command"] = (str(program), *arguments)
    return schema.Task(**fields, entrypoint=program, external=True, packages=_packages(program))


def check_command(reader: SectionReader, task: schema.Task, runner: schema.Runner) -> None:
    """Note what is said to torchrun, which starts no command."""
    if not task.is_command:
        return
    for name in (*runner.extra, *(["rdzv_id"] if runner.rdzv_id else [])):
        message = "is torchrun's, by which no command is started (experiment.task.type)"
        reader.problem(f"experiment.runner.{name}", message)
    for name in ("redirects", "tee"):
        if not _STREAMS.fullmatch(text := getattr(runner, name)):
            message = "expected 0, 1, 2, 3 or RANK:NUMBER with commas between them"
            reader.problem(f"experiment.runner.{name}", f"{message}, found {format_value(text)}")


def _named(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Every word of a command, with the option that it is the value of."""
    before = ""
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("-") and equals:
            yield name.lstrip("-"), value
        elif not word.startswith("-"):
            yield before, word
        before = word.lstrip("-") if word.startswith("-") and not equals else ""


def _elsewhere(program: Path) -> str:
    """Return a hint for a program that FlagScale has and this project lacks."""
    if program.parts[-3:-1] != ("flagscale", "train") or not program.stem.startswith("train_"):
        return ""
    return "; train_gpt.py is the one program here: give the path of another's, in its checkout"


def _packages(program: Path) -> tuple[Path, ...]:
    """Return the package directories of the checkout that contains an external program, its
    Megatron-LM first, as its own launcher orders them; none for a standalone program or one of this
    project."""
    for root in program.parents:
        if root == schema.PROJECT:
            break
        backends = [root / "third_party" / "Megatron-LM", root / "megatron", root]
        packages = [path for path in backends if (path / "megatron" / "training").is_dir()]
        if packages or (root / "flagscale" / "__init__.py").is_file():
            return tuple(dict.fromkeys((*packages, root)))
    return ()


def find_program(text: str) -> Path:
    """The training program of this name: in the working directory, or else in this project; the
    former where it is in neither."""
    path, beside = absolute_path(text), schema.PROJECT / text
    if not path.is_file() and Path(text) in _SAME:
        return schema.OWN_PROGRAM
    return path if path.is_file() or not beside.is_file() else beside


def read_runner(reader: SectionReader, data: Mapping[Any, Any]) -> schema.Runner:
    """``experiment.runner``. Keys that are neither the launcher's nor torchrun's are refused."""
    prefix = "experiment.runner."
    settings = dict(data)
    if isinstance(settings.get("nnodes"), (str, int)):
        # The text, since YAML takes an unquoted 2:4 for 124, minutes and seconds.
        settings["nnodes"] = reader.text(f"{prefix}nnodes", settings["nnodes"]).partition(":")[0]
    fields = reader.fields(schema.Runner, settings, prefix, others=True)
    is_builtin = _check_type(reader, fields)
    if not is_builtin:
        fields["settings"] = reader.mapping(data, fields["type"], prefix)
    if data.get("notify") is not None:
        fields["notify"] = _read_notify(reader, data)
    if data.get("slurm") is not None:
        fields["slurm"] = read_slurm(reader, data)
    documentation = schema.documented(schema.Runner)
    extra: dict[str, str | None] = {}
    for name, value in data.items():
        option = str(name).replace("-", "_")
        if name in documentation or name in _SECTIONS or value is None or value is False:
            continue
        if not is_builtin and name == fields["type"]:
            continue
        if option in SET_BY_LAUNCHER:
            reader.problem(f"{prefix}{name}", f"cannot be given: {SET_BY_LAUNCHER[option]}")
        elif option not in PASSED_ON:
            reader.unknown(f"{prefix}{name}", option, [*documentation, *_SECTIONS, *PASSED_ON])
        elif isinstance(value, (Mapping, list)):
            reader.problem(f"{prefix}{name}", f"expected one value, found {format_value(value)}")
        else:
            extra |= _passed_on(reader, f"{prefix}{name}", PASSED_ON[option], value)
    _check_runner(reader, fields, data, is_builtin=is_builtin)
    return schema.Runner(**fields, extra=extra)


def _passed_on(
    reader: SectionReader, key: str, option: Argument, value: Any
) -> dict[str, str | None]:
    """The text that torchrun gets for one of its options; None for a switch, if it is on."""
    text = reader.text(key, value)
    if complaint := why_unfit(text):
        reader.problem(key, complaint)
        return {}
    try:
        converted = convert(option, value if option.kind == "bool" else text)
    except ValueError as error:
        reader.problem(key, str(error))
        return {}
    if option.kind == "bool":
        return {option.name: None} if converted else {}
    return {option.name: text}


def _check_type(reader: SectionReader, fields: dict[str, Any]) -> bool:
    """Return whether the runner is one of this project's; the default is. An unknown runner is
    reported and left out."""
    name = fields.get("type")
    if name is None or name in RUNNERS.builtin:
        return True
    if not RUNNERS.explain_missing(name):
        return False
    names = RUNNERS.names()
    message = (
        f"expected one of {', '.join(names)}, found {format_value(name)}{did_you_mean(name, names)}"
    )
    if name in _SCHEDULERS:
        message = (
            f"{name}: this version launches with {', '.join(RUNNERS.builtin)}, and no installed "
            "package brings such a runner (entry points `flagscale.runners`)"
        )
    reader.problem("experiment.runner.type", message)
    del fields["type"]
    return True


def _read_notify(reader: SectionReader, data: Mapping[Any, Any]) -> schema.Notify:
    """``experiment.runner.notify``."""
    prefix = "experiment.runner.notify."
    section = reader.mapping(data, "notify", "experiment.runner.")
    # YAML takes a plain `on` for true.
    settings = {"on" if key is True else key: value for key, value in section.items()}
    notify = schema.Notify(**reader.fields(schema.Notify, settings, prefix))
    if not notify.command and not notify.webhook:
        reader.problem(prefix[:-1], "expected a `command`, a `webhook`, or both")
    if notify.webhook and not notify.webhook.startswith(("https://", "http://")):
        # Its value stays out of the message: it may hold a token.
        reader.problem(f"{prefix}webhook", "expected an address that begins with https://")
    return notify


def _check_runner(
    reader: SectionReader, fields: dict[str, Any], data: Mapping[Any, Any], *, is_builtin: bool
) -> None:
    prefix = "experiment.runner."
    hostfile = fields.get("hostfile")
    if hostfile is not None and not hostfile.is_file():
        reader.problem(f"{prefix}hostfile", f"no file {short_path(hostfile)}")
    if fields.get("type") == "slurm":
        check_slurm(reader, fields)
        fields["nnodes"] = fields.get("nnodes", getattr(fields.get("slurm"), "nodes", None))
    elif is_builtin and data.get("hostfile") is None and fields.get("nnodes", 1) > 1:
        message = f"{fields['nnodes']} hosts, but no `hostfile` names them"
        reader.problem(f"{prefix}nnodes", message)
    if fields.get("per_node_task") and (hostfile is not None or fields.get("nnodes", 1) > 1):
        message = "true: the hosts of a run do one job together; start a run on each of them"
        reader.problem(f"{prefix}per_node_task", message)
    if fields.get("on_failure") == "leave" and fields.get("max_restarts"):
        message = "`leave` lets the other hosts go on, so the job cannot be started again"
        reader.problem(f"{prefix}on_failure", message)
    if fields.get("liveness_port") and fields.get("liveness_port") == fields.get("master_port"):
        reader.problem(f"{prefix}liveness_port", "is `master_port`, where the ranks meet")
    endpoint = fields.get("rdzv_endpoint")
    if endpoint and not re.fullmatch(r"\S+:\d{1,5}", endpoint):
        message = f"expected host:port, found {format_value(endpoint)}"
        reader.problem(f"{prefix}rdzv_endpoint", message)


def read_environments(reader: SectionReader, data: Mapping[Any, Any]) -> schema.Environments:
    """``experiment.envs`` with its parts for a device type and for a host."""
    prefix = "experiment.envs."
    common = {name: value for name, value in data.items() if name not in _SCOPES}
    by_scope: dict[str, dict[str, Mapping[str, str]]] = {}
    for scope in _SCOPES:
        parts = reader.mapping(data, scope, prefix)
        by_scope[scope] = {
            str(name): _variables(
                reader, reader.mapping(parts, name, f"{prefix}{scope}."), f"{prefix}{scope}.{name}."
            )
            for name in parts
        }
    return schema.Environments(
        common=_variables(reader, common, prefix),
        by_type=by_scope["device_type_specific"],
        by_host=by_scope["node_specific"],
    )


def _variables(reader: SectionReader, data: Mapping[Any, Any], prefix: str) -> dict[str, str]:
    variables: dict[str, str] = {}
    for name, value in data.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            near = did_you_mean(str(name), _SCOPES) if prefix == "experiment.envs." else ""
            reader.problem(key, f"expected one value, found a section{near}")
        elif isinstance(value, list):
            joined = ",".join(str(item) for item in value)
            reader.problem(key, f"expected one value, found a list; write {joined}")
        elif not _VARIABLE.fullmatch(str(name)):
            reader.problem(key, f"{format_value(str(name))} cannot be the name of a variable")
        elif value is not None:
            text = reader.text(key, value)
            typed = reader.sources.texts.get(key) or ""
            if complaint := why_unfit(f"{name}={without_references(text)}") or why_unfit(typed):
                reader.problem(key, complaint)
            variables[str(name)] = text
    return variables


def read_commands(reader: SectionReader, data: Mapping[Any, Any]) -> schema.Commands:
    """``experiment.cmds``."""
    return schema.Commands(**reader.fields(schema.Commands, data, "experiment.cmds."))
