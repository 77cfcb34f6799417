"""Reading the section ``experiment``: task, runner, environment variables and shell commands.

``config.load`` calls :func:`read_experiment` with the composed YAML. Problems are collected by the
:class:`~flagscale.config.reader.SectionReader`; nothing here raises.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flagscale.config import schema
from flagscale.config.arguments.compat.flagscale_runner import (
    UNUSED_RUNNER_KEYS,
    UNUSED_RUNNER_SECTIONS,
    is_gpt_program,
    other_family,
)
from flagscale.config.arguments.spec.argument import Argument
from flagscale.config.arguments.spec.values import (
    MAX_NAME,
    byte_length,
    convert,
    did_you_mean,
    format_value,
    why_unfit,
)
from flagscale.config.interpolation import remove_references
from flagscale.config.overrides import SUBSECTIONS, subsections_of
from flagscale.config.reader import SectionReader, absolute_path
from flagscale.config.runners import CLOUD_RUNNERS, RUNNERS
from flagscale.config.secrets import is_secret
from flagscale.config.slurm_reader import check_slurm, read_slurm
from flagscale.config.torchrun import REFUSED_TORCHRUN_OPTIONS, TORCHRUN_OPTIONS
from flagscale.config.tuner_reader import read_tuner
from flagscale.config.yaml_file import short_path

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_STREAMS = re.compile(r"[0-3]|[0-9]+:[0-3](?:,[0-9]+:[0-3])*")
_OTHER_SCHEDULERS = ("kubernetes",)
_RUNNER = "experiment.runner."
_RUNNERS_WITH_SPARES = ("ssh", "slurm")
_RUNNER_SECTIONS = ("notify", "slurm")
_ENVIRONMENT_SCOPES = ("device_type_specific", "node_specific")


def read_experiment(reader: SectionReader, data: Mapping[Any, Any]) -> schema.Experiment:
    """Read the section ``experiment``.

    Neither the arguments of the training program nor the fields that describe the configuration as
    a whole (``overrides``, ``resolved``, ``sources``) are filled in.

    A name or a directory that cannot be read is reported and replaced, so that the rest can be
    checked.
    """
    prefix = "experiment."
    section = reader.read_section(data, "experiment")
    settings = {key: value for key, value in section.items() if key not in (*SUBSECTIONS, "envs")}
    subsection_keys = {
        key: f"{prefix}{subsection}.{key}"
        for subsection, kind in SUBSECTIONS.items()
        for key in schema.documented_fields(kind)
    }
    fields = reader.read_fields(
        schema.Experiment,
        settings,
        prefix,
        subsections=subsections_of(""),
        keys_of_other_sections=subsection_keys,
    )
    if reason := _explain_unfit_name(fields.get("name", "")):
        reader.add_problem("experiment.exp_name", reason)
    task = read_task(reader, reader.read_section(section, "task", prefix))
    runner = read_runner(reader, reader.read_section(section, "runner", prefix))
    check_command(reader, task, runner)
    envs = read_environments(reader, reader.read_section(section, "envs", prefix))
    cmds = read_commands(reader, reader.read_section(section, "cmds", prefix))
    return schema.Experiment(
        name=fields.get("name", ""),
        exp_dir=fields.get("exp_dir", Path.cwd()),
        task=task,
        runner=runner,
        envs=envs,
        cmds=cmds,
        config_file=reader.sources.file,
        tuner=read_tuner(reader, section),
        unreferenced_keys=tuple(reader.unreferenced),
    )


def _explain_unfit_name(name: str) -> str | None:
    """Return why a name cannot be shown in one line of a terminal or be the name of a file, or
    None.
    """
    unprintable = next((character for character in name if not character.isprintable()), None)
    if unprintable is not None:
        return f"expected printable text, found the character {unprintable!a}"
    if byte_length(name) > MAX_NAME:
        return f"is {byte_length(name):,} bytes long; expected at most {MAX_NAME}"
    return None


def read_task(reader: SectionReader, data: Mapping[Any, Any]) -> schema.Task:
    """Read ``experiment.task``."""
    data = _split_command(reader, data)
    fields = reader.read_fields(schema.Task, data, "experiment.task.")
    if fields.get("type") == "command":
        return _read_command(reader, fields)
    if fields.get("command"):
        reader.add_problem("experiment.task.command", "needs `type: command`")
    key = "experiment.task.entrypoint"
    if "entrypoint" in fields:
        fields["entrypoint"] = find_program(reader.scalar_text(key, data["entrypoint"]))
    entrypoint: Path = fields.get("entrypoint", schema.OWN_PROGRAM)
    if not entrypoint.is_file():
        _report_missing_program(reader, key, entrypoint)
    elif entrypoint.suffix != ".py":
        reader.add_problem(key, f"expected a Python program, *.py, found {short_path(entrypoint)}")
    external = entrypoint.resolve() != schema.OWN_PROGRAM
    return schema.Task(
        **fields, external=external, packages=_package_directories(entrypoint) if external else ()
    )


def _split_command(reader: SectionReader, data: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return the section with a command that is given as one text split into words."""
    text = data.get("command")
    if not isinstance(text, str):
        return data
    try:
        return {**data, "command": shlex.split(text)}
    except ValueError as error:
        reader.add_problem(
            "experiment.task.command", f"{format_value(text)} cannot be split: {error}"
        )
        return {**data, "command": None, "type": None}


def _read_command(reader: SectionReader, fields: dict[str, Any]) -> schema.Task:
    """Read a task that runs a command. If the command is a Python script of this machine, the
    task's ``entrypoint`` is its file.
    """
    key = "experiment.task.command"
    fields.pop("entrypoint", None)
    words = fields.get("command", ())
    if not any(words[:1]):
        if not any(problem.key == key for problem in reader.problems):
            reader.add_problem(
                key, "is required with `type: command`: the program and its arguments"
            )
        return schema.Task(**fields, external=True)
    first, *arguments = words
    for reason in filter(None, map(why_unfit, words)):
        reader.add_problem(key, reason)
    for name, value in _option_values(words):
        if is_secret(name, value):
            message = "looks like a secret, which a script and the process list would show; give "
            reader.add_problem(key, f"{name or 'a word'} {message}it in experiment.envs")
    if not first.endswith(".py"):
        return schema.Task(**fields, external=True)
    program = find_program(first)
    if not program.is_file():
        reader.add_problem(key, f"no file {short_path(program)}")
    fields["command"] = (str(program), *arguments)
    return schema.Task(
        **fields, entrypoint=program, external=True, packages=_package_directories(program)
    )


def check_command(reader: SectionReader, task: schema.Task, runner: schema.Runner) -> None:
    """Report options of torchrun for a command, because commands are started without torchrun."""
    if not task.is_command:
        return
    for name in (*runner.extra, *(["rdzv_id"] if runner.rdzv_id else [])):
        message = "is an option of torchrun, which does not start commands (experiment.task.type)"
        reader.add_problem(f"experiment.runner.{name}", message)
    for name in ("redirects", "tee"):
        if not _STREAMS.fullmatch(text := getattr(runner, name)):
            message = "expected 0, 1, 2, 3 or RANK:NUMBER with commas between them"
            reader.add_problem(
                f"experiment.runner.{name}", f"{message}, found {format_value(text)}"
            )


def _option_values(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each argument of a command as (option, value); option is empty for a positional one."""
    option = ""
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("-") and equals:
            yield name.lstrip("-"), value
        elif not word.startswith("-"):
            yield option, word
        option = word.lstrip("-") if word.startswith("-") and not equals else ""


def _report_missing_program(reader: SectionReader, key: str, program: Path) -> None:
    """Report a training program that does not exist. If FlagScale has it, for models that this
    project does not train, problems of its arguments would only follow from that.
    """
    path = short_path(program)
    if family := other_family(_project_path(program)):
        reader.add_problem(key, f"no file {path}: {family}")
        reader.unreadable.append("train")
    elif program.parent.parts[-2:] == ("flagscale", "train"):
        hint = "train_gpt.py is this project's only program: give the path of another"
        reader.add_problem(key, f"no file {path}; {hint} in its checkout")
    else:
        reader.add_problem(key, f"no file {path}")


def _project_path(program: Path) -> str:
    """Return the path of a program relative to the checkout that would contain it."""
    parts = program.parts
    start = max((i for i, part in enumerate(parts[:-1]) if part == "flagscale"), default=0)
    return "/".join(parts[start:])


def _package_directories(program: Path) -> tuple[Path, ...]:
    """Return the package directories of the checkout that contains an external program.

    Megatron-LM's comes first, as in the checkout's own launcher. Empty for a standalone program or
    one of this project.
    """
    for root in program.parents:
        if root == schema.PROJECT:
            break
        candidates = [root / "third_party" / "Megatron-LM", root / "megatron", root]
        packages = [path for path in candidates if (path / "megatron" / "training").is_dir()]
        if packages or (root / "flagscale" / "__init__.py").is_file():
            return tuple(dict.fromkeys((*packages, root)))
    return ()


def find_program(text: str) -> Path:
    """Return the path of a training program: in the working directory, or else in this project. If
    it is in neither, return the path in the working directory.

    FlagScale's paths of the program that trains the same models stand for this project's own.
    """
    path, project_path = absolute_path(text), schema.PROJECT / text
    if not path.is_file() and is_gpt_program(text):
        return schema.OWN_PROGRAM
    return path if path.is_file() or not project_path.is_file() else project_path


def read_runner(reader: SectionReader, data: Mapping[Any, Any]) -> schema.Runner:
    """Read ``experiment.runner``. Keys that neither the launcher nor torchrun has are reported."""
    prefix = "experiment.runner."
    settings = _undo_yaml_types(reader, data)
    fields = reader.read_fields(schema.Runner, settings, prefix, ignore_unknown=True)
    is_builtin = _check_type(reader, fields)
    if not is_builtin:
        fields["settings"] = reader.read_section(data, fields["type"], prefix)
    if data.get("notify") is not None:
        fields["notify"] = _read_notify(reader, data)
    if data.get("slurm") is not None:
        fields["slurm"] = read_slurm(reader, data)
    documentation = schema.documented_fields(schema.Runner)
    extra: dict[str, str | None] = {}
    for name, value in data.items():
        option = str(name).replace("-", "_")
        if name in documentation or name in _RUNNER_SECTIONS or value is None or value is False:
            continue
        if not is_builtin and name == fields["type"]:
            continue
        if option in REFUSED_TORCHRUN_OPTIONS:
            reader.add_problem(
                f"{prefix}{name}", f"cannot be given: {REFUSED_TORCHRUN_OPTIONS[option]}"
            )
        elif option in UNUSED_RUNNER_KEYS:
            _note_unused_runner_key(reader, f"{prefix}{option}", value)
        elif option not in TORCHRUN_OPTIONS:
            reader.add_unknown_key(
                f"{prefix}{name}", option, [*documentation, *_RUNNER_SECTIONS, *TORCHRUN_OPTIONS]
            )
        elif isinstance(value, (Mapping, list)):
            reader.add_problem(
                f"{prefix}{name}", f"expected one value, found {format_value(value)}"
            )
        else:
            extra |= _read_torchrun_option(
                reader, f"{prefix}{name}", TORCHRUN_OPTIONS[option], value
            )
    _read_health(reader, fields)
    if fields.get("on_bad_host") == "shrink":
        _read_smallest_job(reader, data, fields)
    _check_runner(reader, fields, data, is_builtin=is_builtin)
    return schema.Runner(**fields, extra=extra)


def _undo_yaml_types(reader: SectionReader, data: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the runner's section with the texts of values that YAML takes for another type."""
    settings = dict(data)
    if isinstance(settings.get("nnodes"), (str, int)):
        # YAML reads an unquoted 2:4 as 124 (minutes and seconds).
        text = reader.scalar_text(f"{_RUNNER}nnodes", settings["nnodes"])
        smallest, _, largest = text.partition(":")
        shrinks = settings.get("on_bad_host") == "shrink"
        settings["nnodes"] = largest if largest and shrinks else smallest
    if settings.get("health") is False:
        settings["health"] = "off"  # which is a boolean in YAML
    return settings


def _read_smallest_job(
    reader: SectionReader, data: Mapping[Any, Any], fields: dict[str, Any]
) -> None:
    """Read the smaller number of ``nnodes: a:b``, with which a job may go on."""
    key, text = f"{_RUNNER}nnodes", ""
    if isinstance(data.get("nnodes"), (str, int)):
        text = reader.scalar_text(key, data["nnodes"])
    smallest, _, largest = text.partition(":")
    if not largest:
        message = "`shrink` needs the smallest and the largest number of hosts: `nnodes: a:b`"
        reader.add_problem(f"{_RUNNER}on_bad_host", message)
    elif not smallest.isdecimal() or not 0 < int(smallest) < fields.get("nnodes", 0):
        reader.add_problem(key, f"expected a:b with a from 1 and below b, found {text}")
    else:
        fields["min_nnodes"] = int(smallest)


def _read_health(reader: SectionReader, fields: dict[str, Any]) -> None:
    """Apply FlagScale's name of ``health``, and check what it needs."""
    key = "experiment.runner.health"
    if fields.get("enable_gpu_health_check"):
        if fields.get("health") == "off":
            reader.add_problem(key, "off contradicts `enable_gpu_health_check: true`; remove one")
        fields.setdefault("health", "quick")
    if fields.get("health", "off") != "off" and fields.get("preflight") is False:
        message = f"{fields['health']} is a part of the checks that `preflight: false` omits"
        reader.add_problem(key, message)


def _note_unused_runner_key(reader: SectionReader, key: str, value: Any) -> None:
    """Record a key of FlagScale's runner that has no effect here. A section that is not enabled is
    off there, too.
    """
    is_section = key.removeprefix(_RUNNER) in UNUSED_RUNNER_SECTIONS
    if is_section and not isinstance(value, Mapping):
        reader.add_problem(key, f"expected a section with keys, found {format_value(value)}")
        return
    if is_section:
        _check_unused_section(reader, key, value)
    if not is_section or value.get("enabled"):
        reader.unreferenced.append(key)


def _check_unused_section(reader: SectionReader, key: str, section: Mapping[Any, Any]) -> None:
    """Report misspelled names in a section that has no effect."""
    names = UNUSED_RUNNER_SECTIONS[key.removeprefix(_RUNNER)]
    for name, value in section.items():
        inner = f"{key}.{name}"
        if name not in names:
            reader.add_unknown_key(inner, name, names)
        elif inner.removeprefix(_RUNNER) in UNUSED_RUNNER_SECTIONS and isinstance(value, Mapping):
            _check_unused_section(reader, inner, value)


def _read_torchrun_option(
    reader: SectionReader, key: str, option: Argument, value: Any
) -> dict[str, str | None]:
    """Return an option of torchrun with its text; None for a flag that is on. Empty for a flag that
    is off and for a wrong value, which is reported.
    """
    text = reader.scalar_text(key, value)
    if reason := why_unfit(text):
        reader.add_problem(key, reason)
        return {}
    try:
        converted = convert(option, value if option.kind == "bool" else text)
    except ValueError as error:
        reader.add_problem(key, str(error))
        return {}
    if option.kind == "bool":
        return {option.name: None} if converted else {}
    return {option.name: text}


def _check_type(reader: SectionReader, fields: dict[str, Any]) -> bool:
    """Return whether the runner is built in, as the default is. An unknown runner is reported and
    removed.
    """
    name = fields.get("type")
    if name is None or name in RUNNERS.builtin:
        return True
    if not RUNNERS.explain_missing(name):
        return False
    names = RUNNERS.names()
    message = (
        f"expected one of {', '.join(names)}, found {format_value(name)}{did_you_mean(name, names)}"
    )
    if name in _OTHER_SCHEDULERS:
        message = (
            f"{name}: this version launches with {', '.join(RUNNERS.builtin)}, and no installed "
            "package provides such a runner (entry points `flagscale.runners`); in a pod, `cloud` "
            "starts this host's part of the job"
        )
    reader.add_problem("experiment.runner.type", message)
    del fields["type"]
    return True


def _read_notify(reader: SectionReader, data: Mapping[Any, Any]) -> schema.Notify:
    """Read ``experiment.runner.notify``."""
    prefix = "experiment.runner.notify."
    section = reader.read_section(data, "notify", "experiment.runner.")
    # YAML reads an unquoted `on` as true.
    settings = {"on" if key is True else key: value for key, value in section.items()}
    notify = schema.Notify(**reader.read_fields(schema.Notify, settings, prefix))
    if not notify.command and not notify.webhook:
        reader.add_problem(prefix[:-1], "expected a `command`, a `webhook`, or both")
    if notify.webhook and not notify.webhook.startswith(("https://", "http://")):
        # The message omits the value, because it may contain a token.
        reader.add_problem(f"{prefix}webhook", "expected an address that begins with https://")
    return notify


def _check_runner(
    reader: SectionReader, fields: dict[str, Any], data: Mapping[Any, Any], *, is_builtin: bool
) -> None:
    prefix = "experiment.runner."
    hostfile = fields.get("hostfile")
    names_hosts = any(data.get(name) for name in ("hostfile", "hosts"))
    if hostfile is not None and not hostfile.is_file():
        reader.add_problem(f"{prefix}hostfile", f"no file {short_path(hostfile)}")
    if hostfile is not None and fields.get("hosts"):
        reader.add_problem(f"{prefix}hosts", "names the hosts, as `hostfile` does; remove one")
    if fields.get("type") == "slurm":
        check_slurm(reader, fields)
        fields["nnodes"] = fields.get("nnodes", getattr(fields.get("slurm"), "nodes", None))
    elif fields.get("type") in CLOUD_RUNNERS:
        _check_cloud(reader, fields)
    elif is_builtin and not names_hosts and fields.get("nnodes", 1) > 1:
        message = f"{fields['nnodes']} hosts, but no `hostfile` or `hosts` that lists them"
        reader.add_problem(f"{prefix}nnodes", message)
    if fields.get("node_rank") is not None and fields.get("type") not in CLOUD_RUNNERS:
        message = "the launcher numbers the hosts in the order of the hostfile; with `type: cloud` "
        reader.add_problem(f"{prefix}node_rank", f"{message}it is the rank of this host")
    if fields.get("per_node_task") and (names_hosts or fields.get("nnodes", 1) > 1):
        message = "true: the hosts of a run execute one job together; start a run on each of them"
        reader.add_problem(f"{prefix}per_node_task", message)
    if fields.get("on_failure") == "leave" and fields.get("max_restarts"):
        message = "`leave` lets the other hosts continue, so the job cannot be restarted"
        reader.add_problem(f"{prefix}on_failure", message)
    for name, message in _check_spares(fields, names_hosts=names_hosts):
        reader.add_problem(f"{prefix}{name}", message)
    if fields.get("liveness_port") and fields.get("liveness_port") == fields.get("master_port"):
        reader.add_problem(
            f"{prefix}liveness_port", "equals `master_port`, the rendezvous port of the ranks"
        )
    if fields.get("metrics_port") and fields.get("metrics_port") in (
        fields.get("master_port"),
        fields.get("liveness_port"),
    ):
        reader.add_problem(f"{prefix}metrics_port", "equals `master_port` or `liveness_port`")
    endpoint = fields.get("rdzv_endpoint")
    if endpoint and not re.fullmatch(r"\S+:\d{1,5}", endpoint):
        message = f"expected host:port, found {format_value(endpoint)}"
        reader.add_problem(f"{prefix}rdzv_endpoint", message)


def _check_spares(fields: Mapping[str, Any], *, names_hosts: bool) -> Iterator[tuple[str, str]]:
    """Yield the problems of hosts that wait, or of a job that goes on without a host: key and
    message.
    """
    spares, choice = fields.get("spares", 0), fields.get("on_bad_host", "stop")
    if choice == "replace" and not spares:
        yield "on_bad_host", "`replace` needs hosts that wait: set `spares` to their number"
    if spares and choice == "stop":
        yield "spares", "they would wait for nothing: set `on_bad_host: replace`"
    if not spares and choice != "shrink":
        return
    key = "spares" if spares else "on_bad_host"
    if fields.get("type", "ssh") not in _RUNNERS_WITH_SPARES:
        runners = " or ".join(f"`type: {name}`" for name in _RUNNERS_WITH_SPARES)
        yield key, f"not supported with `type: {fields['type']}`, only with {runners}"
    elif not names_hosts and spares and fields.get("type") != "slurm":
        yield key, "they are hosts of the `hostfile` or of `hosts`, and neither is set"
    if fields.get("on_failure") == "leave":
        yield "on_failure", "`leave` lets the other hosts continue, so no host can be replaced"


def _check_cloud(reader: SectionReader, fields: dict[str, Any]) -> None:
    """Check the keys of a runner that starts this host alone, which stays in the foreground."""
    fields["foreground"] = True
    for name in ("hostfile", "hosts", "rdzv_endpoint"):
        if fields.get(name):
            message = (
                "has no meaning with `type: cloud`: every host starts its own part, and meets "
            )
            message += "the others at `master_addr`"
            reader.add_problem(f"experiment.runner.{name}", message)


def read_environments(reader: SectionReader, data: Mapping[Any, Any]) -> schema.Environments:
    """Read ``experiment.envs`` with its sections per device type and per host."""
    prefix = "experiment.envs."
    common = {name: value for name, value in data.items() if name not in _ENVIRONMENT_SCOPES}
    by_scope: dict[str, dict[str, Mapping[str, str]]] = {}
    for scope in _ENVIRONMENT_SCOPES:
        parts = reader.read_section(data, scope, prefix)
        by_scope[scope] = {
            str(name): _read_variables(
                reader,
                reader.read_section(parts, name, f"{prefix}{scope}."),
                f"{prefix}{scope}.{name}.",
            )
            for name in parts
        }
    return schema.Environments(
        common=_read_variables(reader, common, prefix),
        by_type=by_scope["device_type_specific"],
        by_host=by_scope["node_specific"],
    )


def _read_variables(reader: SectionReader, data: Mapping[Any, Any], prefix: str) -> dict[str, str]:
    variables: dict[str, str] = {}
    for name, value in data.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            suggestion = (
                did_you_mean(str(name), _ENVIRONMENT_SCOPES) if prefix == "experiment.envs." else ""
            )
            reader.add_problem(key, f"expected one value, found a section{suggestion}")
        elif isinstance(value, list):
            joined = ",".join(str(item) for item in value)
            reader.add_problem(key, f"expected one value, found a list; write {joined}")
        elif not _VARIABLE.fullmatch(str(name)):
            reader.add_problem(key, f"{format_value(str(name))} cannot be the name of a variable")
        elif value is not None:
            text = reader.scalar_text(key, value)
            written_text = reader.sources.texts.get(key) or ""
            if reason := why_unfit(f"{name}={remove_references(text)}") or why_unfit(written_text):
                reader.add_problem(key, reason)
            variables[str(name)] = text
    return variables


def read_commands(reader: SectionReader, data: Mapping[Any, Any]) -> schema.Commands:
    """Read ``experiment.cmds``."""
    return schema.Commands(**reader.read_fields(schema.Commands, data, "experiment.cmds."))
