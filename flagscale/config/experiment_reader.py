"""Reading ``experiment``: task, runner, environment, commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flagscale.config import schema
from flagscale.config.arguments.spec import Argument
from flagscale.config.arguments.values import convert, did_you_mean, shown, unfit
from flagscale.config.interpolation import literal
from flagscale.config.reader import Reader, absolute
from flagscale.config.runners import RUNNERS
from flagscale.config.secrets import is_secret
from flagscale.config.slurm_reader import check_slurm, read_slurm
from flagscale.config.torchrun import PASSED_ON, SET_BY_LAUNCHER
from flagscale.config.yaml_file import short

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_STREAMS = re.compile(r"[0-3]|[0-9]+:[0-3](?:,[0-9]+:[0-3])*")
_SCHEDULERS = ("kubernetes", "cloud")
_SECTIONS = ("notify", "slurm")
# FlagScale's program for unlike devices; there is one for all here.
_SAME = (Path("flagscale/train/hetero/train_gpt.py"),)
_SCOPES = ("device_type_specific", "node_specific")


def read_task(reader: Reader, data: Mapping[Any, Any]) -> schema.Task:
    """``experiment.task``."""
    data = _split(reader, data)
    found = reader.fields(schema.Task, data, "experiment.task.")
    if found.get("type") == "command":
        return _read_command(reader, found)
    if found.get("command"):
        reader.problem("experiment.task.command", "needs `type: command`")
    key = "experiment.task.entrypoint"
    if "entrypoint" in found:
        found["entrypoint"] = find_program(reader.text(key, data["entrypoint"]))
    entrypoint: Path = found.get("entrypoint", schema.OWN_PROGRAM)
    if not entrypoint.is_file():
        reader.problem(key, f"no file {short(entrypoint)}{_elsewhere(entrypoint)}")
    elif entrypoint.suffix != ".py":
        reader.problem(key, f"expected a Python program, *.py, found {short(entrypoint)}")
    external = entrypoint.resolve() != schema.OWN_PROGRAM
    return schema.Task(
        **found, external=external, packages=_packages(entrypoint) if external else ()
    )


def _split(reader: Reader, data: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """The section with a command that is a text in words."""
    text = data.get("command")
    if not isinstance(text, str):
        return data
    try:
        return {**data, "command": shlex.split(text)}
    except ValueError as error:
        reader.problem("experiment.task.command", f"{shown(text)} cannot be split: {error}")
        return {**data, "command": None, "type": None}


def _read_command(reader: Reader, found: dict[str, Any]) -> schema.Task:
    """The task that runs a command. ``entrypoint`` is then the file of a Python program of this
    machine's, if it is one."""
    key = "experiment.task.command"
    found.pop("entrypoint", None)
    words = found.get("command", ())
    if not any(words[:1]):
        if not any(problem.key == key for problem in reader.problems):
            reader.problem(key, "is required with `type: command`: the program and its arguments")
        return schema.Task(**found, external=True)
    first, *rest = words
    for complaint in filter(None, map(unfit, words)):
        reader.problem(key, complaint)
    for name, value in _named(words):
        if is_secret(name, value):
            message = "looks like a secret, which a script and the process list would show; give "
            reader.problem(key, f"{name or 'a word'} {message}it in experiment.envs")
    if not first.endswith(".py"):
        return schema.Task(**found, external=True)
    program = find_program(first)
    if not program.is_file():
        reader.problem(key, f"no file {short(program)}")
    found["command"] = (str(program), *rest)
    return schema.Task(**found, entrypoint=program, external=True, packages=_packages(program))


def check_command(reader: Reader, task: schema.Task, runner: schema.Runner) -> None:
    """Note what is said to torchrun, which starts no command."""
    if not task.is_command:
        return
    for name in (*runner.extra, *(["rdzv_id"] if runner.rdzv_id else [])):
        message = "is torchrun's, by which no command is started (experiment.task.type)"
        reader.problem(f"experiment.runner.{name}", message)
    for name in ("redirects", "tee"):
        if not _STREAMS.fullmatch(text := getattr(runner, name)):
            message = "expected 0, 1, 2, 3 or RANK:NUMBER with commas between them"
            reader.problem(f"experiment.runner.{name}", f"{message}, found {shown(text)}")


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
    """What to say of a program that FlagScale has and this project has not."""
    if program.parts[-3:-1] != ("flagscale", "train") or not program.stem.startswith("train_"):
        return ""
    return "; train_gpt.py is the one program here: give the path of another's, in its checkout"


def _packages(program: Path) -> tuple[Path, ...]:
    """Where the packages of the checkout lie that a foreign program is in, its Megatron-LM first,
    as its own launcher has them; none for a program that stands by itself, or in this project."""
    for root in program.parents:
        if root == schema.PROJECT:
            break
        backends = [root / "third_party" / "Megatron-LM", root / "megatron", root]
        found = [path for path in backends if (path / "megatron" / "training").is_dir()]
        if found or (root / "flagscale" / "__init__.py").is_file():
            return tuple(dict.fromkeys((*found, root)))
    return ()


def find_program(text: str) -> Path:
    """The training program of this name: in the working directory, or else in this project; the
    former where it is in neither."""
    path, beside = absolute(text), schema.PROJECT / text
    if not path.is_file() and Path(text) in _SAME:
        return schema.OWN_PROGRAM
    return path if path.is_file() or not beside.is_file() else beside


def read_runner(reader: Reader, data: Mapping[Any, Any]) -> schema.Runner:
    """``experiment.runner``. Keys that are neither the launcher's nor torchrun's are refused."""
    prefix = "experiment.runner."
    given = dict(data)
    if isinstance(given.get("nnodes"), (str, int)):
        # The text, since YAML takes an unquoted 2:4 for 124, minutes and seconds.
        given["nnodes"] = reader.text(f"{prefix}nnodes", given["nnodes"]).partition(":")[0]
    found = reader.fields(schema.Runner, given, prefix, others=True)
    own = _check_type(reader, found)
    if not own:
        found["settings"] = reader.mapping(data, found["type"], prefix)
    if data.get("notify") is not None:
        found["notify"] = _read_notify(reader, data)
    if data.get("slurm") is not None:
        found["slurm"] = read_slurm(reader, data)
    known = schema.documented(schema.Runner)
    extra: dict[str, str | None] = {}
    for name, value in data.items():
        option = str(name).replace("-", "_")
        if name in known or name in _SECTIONS or value is None or value is False:
            continue
        if not own and name == found["type"]:
            continue
        if option in SET_BY_LAUNCHER:
            reader.problem(f"{prefix}{name}", f"cannot be given: {SET_BY_LAUNCHER[option]}")
        elif option not in PASSED_ON:
            reader.unknown(f"{prefix}{name}", option, [*known, *_SECTIONS, *PASSED_ON])
        elif isinstance(value, (Mapping, list)):
            reader.problem(f"{prefix}{name}", f"expected one value, found {shown(value)}")
        else:
            extra |= _passed_on(reader, f"{prefix}{name}", PASSED_ON[option], value)
    _check_runner(reader, found, data, own=own)
    return schema.Runner(**found, extra=extra)


def _passed_on(reader: Reader, key: str, option: Argument, value: Any) -> dict[str, str | None]:
    """The text that torchrun gets for one of its options; None for a switch, if it is on."""
    text = reader.text(key, value)
    if complaint := unfit(text):
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


def _check_type(reader: Reader, found: dict[str, Any]) -> bool:
    """Whether the runner is this project's own, as it is where none is named. One that nobody has
    is refused and left out."""
    name = found.get("type")
    if name is None or name in RUNNERS.own:
        return True
    if not RUNNERS.missing(name):
        return False
    known = RUNNERS.names()
    message = f"expected one of {', '.join(known)}, found {shown(name)}{did_you_mean(name, known)}"
    if name in _SCHEDULERS:
        message = (
            f"{name}: this version launches with {', '.join(RUNNERS.own)}, and no installed "
            "package brings such a runner (entry points `flagscale.runners`)"
        )
    reader.problem("experiment.runner.type", message)
    del found["type"]
    return True


def _read_notify(reader: Reader, data: Mapping[Any, Any]) -> schema.Notify:
    """``experiment.runner.notify``."""
    prefix = "experiment.runner.notify."
    section = reader.mapping(data, "notify", "experiment.runner.")
    # YAML takes a plain `on` for true.
    given = {"on" if key is True else key: value for key, value in section.items()}
    notify = schema.Notify(**reader.fields(schema.Notify, given, prefix))
    if not notify.command and not notify.webhook:
        reader.problem(prefix[:-1], "expected a `command`, a `webhook`, or both")
    if notify.webhook and not notify.webhook.startswith(("https://", "http://")):
        # Its value stays out of the message: it may hold a token.
        reader.problem(f"{prefix}webhook", "expected an address that begins with https://")
    return notify


def _check_runner(
    reader: Reader, found: dict[str, Any], data: Mapping[Any, Any], *, own: bool
) -> None:
    prefix = "experiment.runner."
    hostfile = found.get("hostfile")
    if hostfile is not None and not hostfile.is_file():
        reader.problem(f"{prefix}hostfile", f"no file {short(hostfile)}")
    if found.get("type") == "slurm":
        check_slurm(reader, found)
        found["nnodes"] = found.get("nnodes", getattr(found.get("slurm"), "nodes", None))
    elif own and data.get("hostfile") is None and found.get("nnodes", 1) > 1:
        message = f"{found['nnodes']} hosts, but no `hostfile` names them"
        reader.problem(f"{prefix}nnodes", message)
    if found.get("per_node_task") and (hostfile is not None or found.get("nnodes", 1) > 1):
        message = "true: the hosts of a run do one job together; start a run on each of them"
        reader.problem(f"{prefix}per_node_task", message)
    if found.get("on_failure") == "leave" and found.get("max_restarts"):
        message = "`leave` lets the other hosts go on, so the job cannot be started again"
        reader.problem(f"{prefix}on_failure", message)
    if found.get("liveness_port") and found.get("liveness_port") == found.get("master_port"):
        reader.problem(f"{prefix}liveness_port", "is `master_port`, where the ranks meet")
    endpoint = found.get("rdzv_endpoint")
    if endpoint and not re.fullmatch(r"\S+:\d{1,5}", endpoint):
        message = f"expected host:port, found {shown(endpoint)}"
        reader.problem(f"{prefix}rdzv_endpoint", message)


def read_environments(reader: Reader, data: Mapping[Any, Any]) -> schema.Environments:
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


def _variables(reader: Reader, data: Mapping[Any, Any], prefix: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in data.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            near = did_you_mean(str(name), _SCOPES) if prefix == "experiment.envs." else ""
            reader.problem(key, f"expected one value, found a section{near}")
        elif isinstance(value, list):
            wanted = ",".join(str(item) for item in value)
            reader.problem(key, f"expected one value, found a list; write {wanted}")
        elif not _VARIABLE.fullmatch(str(name)):
            reader.problem(key, f"{shown(str(name))} cannot be the name of a variable")
        elif value is not None:
            text = reader.text(key, value)
            typed = reader.sources.texts.get(key) or ""
            if complaint := unfit(f"{name}={literal(text)}") or unfit(typed):
                reader.problem(key, complaint)
            found[str(name)] = text
    return found


def read_commands(reader: Reader, data: Mapping[Any, Any]) -> schema.Commands:
    """``experiment.cmds``."""
    return schema.Commands(**reader.fields(schema.Commands, data, "experiment.cmds."))
