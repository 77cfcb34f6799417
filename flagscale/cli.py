"""The ``flagscale`` command: one subcommand per action of :mod:`flagscale.config.actions`, and the
tools.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from flagscale import __version__
from flagscale.cli_errors import run_command
from flagscale.commands import completion, health, past_runs
from flagscale.commands.argument_types import is_yaml, parse_natural
from flagscale.commands.flagscale_forms import (
    ActionCall,
    add_run_arguments,
    add_train_arguments,
    read_run_form,
    read_train_form,
)
from flagscale.commands.program import (
    PROGRAM_ACTIONS,
    add_program_arguments,
    reject_bare_program,
    reject_program_options,
    reject_yaml_options,
    run_program,
    split_program,
)
from flagscale.config.actions import ACTIONS, OPTIONS, Action, actions_by_command, call_function
from flagscale.config.documented import documented_fields, key_types
from flagscale.config.schema import BACKEND_SOURCE, PROJECT, Options
from flagscale.errors import ConfigError, RunStateError
from flagscale.launcher.entry import add_sweep_options, run_action, run_sweep_action
from flagscale.module_command import python_arguments

if TYPE_CHECKING:
    from flagscale.launcher.state import RunState
    from flagscale.report.command import Subject

_DESCRIPTION = "One YAML, one command: launch LLM training, watch it and stop it."
_EPILOG = """\
examples
  flagscale init my --model qwen3_8b                          write a new experiment
  flagscale check examples/llama3/conf/train.yaml             check before a run
  flagscale run examples/llama3/conf/train.yaml               start in the background
  flagscale run examples/llama3/conf/train.yaml train=8b num_layers=4 lr=3e-4
  flagscale run examples/llama3/conf/train.yaml -m train.model.seed=1,2,3 --jobs 2
  flagscale run --hosts a,b --nproc 8 train.py --lr 1e-4      any program, without a YAML
  flagscale query examples/llama3/conf/train.yaml --follow    watch it until it ends
  flagscale logs examples/llama3/conf/train.yaml --rank 0 --lines 50
  flagscale logs examples/llama3/conf/train.yaml --level error --since 10m
  flagscale stop examples/llama3/conf/train.yaml              end this run and nothing else
  flagscale runs                                              list your runs
  flagscale stop 20261120                                     by the beginning of its id
  flagscale report 20261120 20261119                          one page: curves, events, failure
  flagscale rerun 20261120 train.model.seed=2                 start a run again, as recorded
  flagscale health --hosts node[01-16]                        find sick hosts before a run
  flagscale explain experiment.runner.nproc_per_node          show the meaning of a key
  flagscale unpatch --backend Megatron-LM                     fetch and adapt the backend
  flagscale comm list                                         list usable backends
  flagscale bench traffic --hosts node[1-4] --tail 3          load their network to a known tail
  flagscale convert /models/Llama-3.2-1B checkpoints/llama    from Hugging Face, or back
  flagscale evaluate checkpoints/llama --tasks arc_easy       with lm-evaluation-harness

`flagscale run CONF/train.yaml x=y` is `python run.py --config-path CONF --config-name train x=y`.
"""

_TOOLS = (
    "init",
    "train",
    "explain",
    "schema",
    "runs",
    "report",
    "rerun",
    "health",
    "completion",
    "version",
    "comm",
    "bench",
    "convert",
    "evaluate",
)
"""Commands that are not actions."""
_COMPLETION_HELP = "print the script of a shell that completes commands, keys, runs and hosts"
_INIT_HELP = "write a new experiment: two commented YAML files"
_SCHEMA_HELP = "print the JSON schema of a YAML, for editors"
_TRAIN_HELP = "run, test, plan, query or stop by the name of a model, as FlagScale does"
_RUNS_HELP = "list your runs, newest first: state, step, age and directory"
_REPORT_HELP = "write a run's page, or one of several side by side: curves, events, hosts, failure"
_RERUN_HELP = "start a run again with its recorded configuration, in a new directory"
_HEALTH_HELP = "measure the hardware of hosts and compare them, without a run"
_TORCH_MODULES = {
    "convert": "flagscale.train.checkpoint.formats.convert",
    "evaluate": "flagscale.train.evaluation.command",
}
"""Modules of the commands that need torch. They parse their own options."""
_PATCH_COMMANDS = {
    "unpatch": ("main_unpatch", "fetch a backend's source and adapt it"),
    "patch": ("main_patch", "turn edits of a backend's source into patches"),
    "patch-status": ("main_status", "show the patches that are applied to a backend's source"),
}


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the console script."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(run_command(lambda: _dispatch(argv)))


def _dispatch(argv: list[str]) -> int:
    """Run the subcommand of a command line, and return its exit code."""
    if argv[:2] == ["config", "explain"]:
        argv = argv[1:]
    if argv[:1] and argv[0] in _PATCH_COMMANDS:
        # These parse their own options.
        function: Callable[[list[str]], int] = getattr(
            import_module("flagscale.patching.cli"), _PATCH_COMMANDS[argv[0]][0]
        )
        return function(argv[1:])
    if argv[:1] == [completion.COMPLETE]:
        return completion.print_candidates(argv[1:], _create_parser(), _read_groups)
    if argv[:1] and argv[0] in _TORCH_MODULES:
        return _run_with_torch(_TORCH_MODULES[argv[0]], argv[1:])
    if argv[:1] in (["comm"], ["bench"]):
        from flagscale.bench.cli import main_bench, main_comm

        return (main_comm if argv[0] == "comm" else main_bench)(argv[1:])
    parser = _create_parser()
    if argv and not argv[0].startswith("-"):
        _require_command(argv[0])
    if not argv:
        parser.print_help()
        return 2
    program: list[str] = []
    if argv[0] in PROGRAM_ACTIONS:
        words, program = split_program(argv[1:])
        argv = [argv[0], *words]
    options, overrides = parser.parse_known_args(argv)
    options.words, options.program = argv[1:], program
    handler: Callable[[argparse.Namespace, list[str]], int] = options.handler
    return handler(options, overrides)


def _read_groups() -> completion.Commands:
    """Return the commands of the groups ``comm`` and ``bench``, for completion."""
    from flagscale.bench.cli import BENCH_COMMANDS, COMM_COMMANDS

    return {
        name: [completion.Candidate(word, row.summary) for word, row in commands.items()]
        for name, commands in (("comm", COMM_COMMANDS), ("bench", BENCH_COMMANDS))
    }


def _require_command(word: str) -> None:
    """Raise an error with a suggestion for a word that is not a command."""
    from flagscale.cli_suggestions import suggest_command

    commands = (*actions_by_command(), *_TOOLS, *_PATCH_COMMANDS)
    if word not in commands:
        raise ConfigError(suggest_command(word, commands), hint="`flagscale -h` lists all commands")


def _create_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flagscale",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", "-v", action="version", version=f"flagscale {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for action in ACTIONS.values():
        subparser = commands.add_parser(
            action.command,
            aliases=[action.name] if action.alias else (),
            help=action.help,
            description=action.help,
        )
        subparser.set_defaults(handler=_run_action)
        _add_action_arguments(subparser, action)
    init = commands.add_parser("init", help=_INIT_HELP, description=_INIT_HELP)
    init.add_argument(
        "directory",
        nargs="?",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="directory that receives conf/train.yaml and conf/train/MODEL.yaml; default: this one",
    )
    init.add_argument(
        "--model",
        metavar="NAME|HF_DIR",
        help="an example, such as llama3_8b, or the directory of a Hugging Face model; default: "
        "llama3_tiny",
    )
    init.set_defaults(handler=_init)
    train = commands.add_parser("train", help=_TRAIN_HELP, description=_TRAIN_HELP)
    add_train_arguments(train)
    train.set_defaults(handler=_train)
    explain = commands.add_parser("explain", help="show the meaning of a configuration key")
    explain.add_argument(
        "key",
        nargs="+",
        help="such as experiment.runner.tee or train.model.num_layers; or words, such as learning "
        "rate; a YAML adds where it has the key",
    )
    explain.set_defaults(handler=_explain_key)
    schema = commands.add_parser("schema", help=_SCHEMA_HELP, description=_SCHEMA_HELP)
    schema.add_argument(
        "file",
        nargs="?",
        choices=("experiment", "train"),
        default="experiment",
        help="of an experiment, as conf/train.yaml (default), or of conf/train/MODEL.yaml",
    )
    schema.set_defaults(handler=_print_schema)
    for name, help_text, add_arguments, handler in (
        ("runs", _RUNS_HELP, past_runs.add_runs_arguments, past_runs.list_runs),
        ("report", _REPORT_HELP, past_runs.add_report_arguments, _write_report),
        ("rerun", _RERUN_HELP, past_runs.add_rerun_arguments, past_runs.rerun),
        ("health", _HEALTH_HELP, health.add_health_arguments, _check_health),
    ):
        subparser = commands.add_parser(name, help=help_text, description=help_text)
        add_arguments(subparser)
        subparser.set_defaults(handler=handler)
    shell = commands.add_parser("completion", help=_COMPLETION_HELP, description=_COMPLETION_HELP)
    shell.add_argument("shell", choices=completion.SHELLS)
    shell.set_defaults(handler=_print_completion)
    version = commands.add_parser("version", help="print the version")
    version.set_defaults(handler=_print_version)
    commands.add_parser(
        "comm",
        help="communication backends: list, bench, groups, pipeline, agreement, tune",
        add_help=False,
    )
    commands.add_parser(
        "bench",
        help="benchmarks: collectives, groups, pipeline, agreement, traffic, training",
        add_help=False,
    )
    commands.add_parser(
        "convert",
        help="convert a model between Hugging Face and training checkpoints",
        add_help=False,
    )
    commands.add_parser(
        "evaluate",
        help="evaluate a checkpoint on tasks of lm-evaluation-harness",
        add_help=False,
    )
    for name, (_, help_text) in _PATCH_COMMANDS.items():
        commands.add_parser(name, help=help_text, add_help=False)
    return parser


def _add_action_arguments(parser: argparse.ArgumentParser, action: Action) -> None:
    """Add the arguments and options of an action."""
    if action.purpose is not None:
        config_help = "the experiment's YAML"
        if action.purpose == "find":
            config_help += ", or a run: its id, name or directory"
            config_help += "" if action.name == "stop" else "; default: the only live run"
        # Optional where a program may take its place; whether it is missing is checked later.
        count = "?" if action.name in PROGRAM_ACTIONS or action.purpose == "find" else None
        parser.add_argument("config", metavar="CONFIG", nargs=count, help=config_help)
    for name in action.options:
        option = OPTIONS[name]
        flags = [_flag_of(name), *filter(None, (option.letter,))]
        value_type = key_types(Options)[name].base
        if value_type is bool:
            parser.add_argument(*flags, action="store_const", const=True, help=option.help)
        else:
            parser.add_argument(
                *flags,
                type=parse_natural if value_type is int else str,
                choices=documented_fields(Options)[name].metadata["choices"],
                help=option.help,
            )
    if action.name in PROGRAM_ACTIONS:
        past_runs.add_code_arguments(parser)
    if action.purpose is not None:
        add_sweep_options(parser)
        # Without a default the error message of argparse would call them required.
        parser.add_argument(
            "overrides",
            nargs="*",
            default=[],
            metavar="key=value",
            help="overrides in Hydra's syntax",
        )
    if action.name in PROGRAM_ACTIONS:
        add_program_arguments(parser)
    if action.name == "run":
        add_run_arguments(parser)


def _flag_of(name: str) -> str:
    """Return the flag of an option of the launcher."""
    return f"--{name.replace('_', '-')}"


def _init(options: argparse.Namespace, extra_words: list[str]) -> int:
    from flagscale.commands.new_experiment import create_experiment

    if extra_words:
        raise ConfigError(f"unknown option {extra_words[0]}", hint="flagscale init -h")
    return create_experiment(options.directory, options.model)


def _train(options: argparse.Namespace, _rest: list[str]) -> int:
    return _call_action(read_train_form(options))


def _call_action(call: ActionCall) -> int:
    """Perform an action that another form of the command line stands for."""
    if call.action in ACTIONS:
        return _dispatch([call.action, str(call.config), *call.words])
    # The YAML's own check answers other actions.
    overrides = [*call.words, f"action={call.action}"]
    return run_action(call.config.parent.absolute(), call.config.name, overrides)


def _run_with_torch(module: str, argv: list[str]) -> NoReturn:
    """Replace this process with a module that needs torch; the launcher does not."""
    if find_spec("torch") is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    paths = [str(BACKEND_SOURCE), str(PROJECT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *python_arguments(module), *argv], environment)


def _run_action(options: argparse.Namespace, extra_words: list[str]) -> int:
    """Run an action with an experiment or a run."""
    # argparse does not treat overrides after an option, or `~key`, as positional arguments.
    action = actions_by_command()[options.command]
    positional_words = [*filter(None, (getattr(options, "config", None),))]
    positional_words += [*getattr(options, "overrides", ())]
    key_overrides: list[str] = getattr(options, "key_options", None) or []
    if action.name == "run" and not options.program:
        call = read_run_form(options)
        if call is not None:
            return _call_action(call)
    if action.name in PROGRAM_ACTIONS and not options.program and options.config is not None:
        reject_bare_program(options.words, options.config, action.name)
    unknown_options = [
        text for text in extra_words if text.startswith("-") or action.purpose is None
    ]
    if unknown_options:
        # The value of an unknown option may be taken for the YAML, and the program for a word.
        has_program = bool(options.program) or any(text.endswith(".py") for text in options.words)
        raise _unknown_option(unknown_options[0], extra_words, action, has_program=has_program)
    values = {name: getattr(options, name) for name in action.options}
    given_options = {name: value for name, value in values.items() if value is not None}
    if action.purpose is None:
        return call_function(action.function, Options(action=action.name, **given_options))
    is_sweep = options.multirun or options.jobs is not None
    if options.program:
        words = [*positional_words, *extra_words, *key_overrides]
        return _run_program(options, words, is_sweep=is_sweep)
    if options.config is None and action.purpose == "find":
        from flagscale.launcher.runs import choose_run

        options.config = choose_run(action.name).run_id
    if options.config is None:
        text = f"`flagscale {action.name}` needs a YAML or a program"
        raise ConfigError(text, hint=f"flagscale {action.name} -h")
    if action.name in PROGRAM_ACTIONS:
        reject_program_options(options)
    overrides = [*options.overrides, *extra_words, *key_overrides]
    if action.purpose == "find" and not is_sweep and not is_yaml(options.config):
        if overrides:
            raise ConfigError(f"{overrides[0]}: an existing run takes no overrides")
        run_options = Options(action=action.name, **given_options)
        return call_function(
            "flagscale.launcher.run_commands:run_named_action", options.config, run_options
        )
    from flagscale.config.overrides import option_override

    _reject_action_override(overrides, action)
    overrides.append(f"action={action.name}")
    overrides += [option_override(name, value) for name, value in given_options.items()]
    config = Path(options.config)
    if is_sweep:
        return run_sweep_action(config.parent.absolute(), config.name, overrides, options)
    return run_action(config.parent.absolute(), config.name, overrides)


def _run_program(options: argparse.Namespace, words: list[str], *, is_sweep: bool) -> int:
    """Run an action with a program in place of a YAML; ``words`` are its overrides."""
    for word in words:
        if "=" not in word and not word.startswith("~"):
            raise ConfigError(
                f"{word}: expected key=value before the program {options.program[0]}",
                hint="give a YAML or a program, not both",
            )
    reject_yaml_options(options, options.program)
    if is_sweep:
        raise ConfigError("-m and --jobs need a YAML: a program has no values to combine")
    return run_program(options.command, options.program, words, options)


def _unknown_option(
    option: str, words: Sequence[str], action: Action, *, has_program: bool
) -> ConfigError:
    from flagscale.cli_suggestions import suggest_option, suggest_override

    hint = f"flagscale {action.name} -h"
    flags = [_flag_of(name) for name in action.options]
    suggestion = suggest_option(option, action.name, flags, has_program=has_program)
    if suggestion is not None:
        hint = suggestion
    elif action.purpose is not None:
        hint = suggest_override(option, words[words.index(option) + 1 :]) or hint
    return ConfigError(f"unknown option {option.partition('=')[0]}", hint=hint)


def _reject_action_override(overrides: Sequence[str], action: Action) -> None:
    """Raise an error for an override ``action=…``, because the subcommand is the action."""
    from flagscale.config.overrides import parse_override

    for override in overrides:
        parsed = parse_override(override)
        if parsed is not None and parsed.key == "action":
            raise ConfigError(
                f"{override}: `flagscale {action.name}` is an action already",
                hint="leave it out, or give another command",
            )


def _check_health(options: argparse.Namespace, extra_words: list[str]) -> int:
    from flagscale.report.health_page import write_health_page

    return health.check_hosts_health(options, extra_words, write_health_page)


def _explain_key(options: argparse.Namespace, _rest: list[str]) -> int:
    from flagscale.config.compose import config_file
    from flagscale.config.explain import explain
    from flagscale.config.sources import trace_sources

    files = [Path(word) for word in options.key if word.endswith((".yaml", ".yml"))]
    overrides = [word for word in options.key if files and "=" in word]
    words = [word for word in options.key if Path(word) not in files and word not in overrides]
    if not words:
        raise ConfigError("explain: which key?", hint=f"flagscale explain lr {files[0]}")
    sources = (
        trace_sources(config_file(files[0].parent, files[0].name), overrides) if files else None
    )
    print(explain(" ".join(words), sources))
    return 0


def _print_schema(options: argparse.Namespace, _rest: list[str]) -> int:
    from flagscale.config import json_schema

    is_train = options.file == "train"
    content = json_schema.train_schema() if is_train else json_schema.experiment_schema()
    print(json_schema.format_schema(content), end="")
    return 0


def _write_report(options: argparse.Namespace, extra_words: list[str]) -> int:
    from flagscale.launcher.sweep_runs import find_sweep
    from flagscale.report import command
    from flagscale.report.tuning_page import find_answer

    if unknown_options := [text for text in extra_words if text.startswith("-")]:
        raise ConfigError(f"unknown option {unknown_options[0]}", hint="flagscale report -h")
    arguments = [*options.runs, *extra_words]
    overrides = [
        text
        for text in arguments
        if "=" in text and not text.startswith((".", "/", "~")) and not Path(text).exists()
    ]
    if overrides and not any(map(is_yaml, arguments)):
        text = f"{overrides[0]} is an override, and none of these is a YAML's run"
        raise ConfigError(text, hint="flagscale report -h")
    texts = [text for text in arguments if text not in overrides]
    if len(texts) == 1 and (answer := find_answer(texts[0])) is not None:
        return command.write_tuning_report(answer, options.output, show=options.open)
    for text in texts:
        if (sweep := find_sweep(text)) is not None:
            if len(texts) > 1:
                raise ConfigError(
                    f"{text} is a sweep: it has a page of its own", hint="name it alone"
                )
            if options.json:
                message = f"{text} is a sweep, whose table is printed by another command"
                raise ConfigError(message, hint=f"flagscale runs {shlex.quote(texts[0])} --json")
            return command.write_sweep_report(sweep, options.output, show=options.open)
    subjects = [_find_subject(text, overrides) for text in texts]
    distinct_subjects = {tuple(s.run_id for s in subject.states): subject for subject in subjects}
    if options.json:
        return command.print_records(list(distinct_subjects.values()))
    return command.write_report(list(distinct_subjects.values()), options.output, show=options.open)


def _find_subject(text: str, overrides: Sequence[str]) -> Subject:
    """Return the run of an id, or all runs of a directory or of a YAML's directory."""
    from flagscale.launcher import runs
    from flagscale.report.command import Subject

    try:
        if is_yaml(text):
            state = past_runs.find_run_of_yaml(text, overrides)
        else:
            state = runs.require_run(text)
            if not runs.is_directory(text):
                _print_note_of_directory(state)
                return Subject([state])
        return Subject(runs.find_history(state.exp_dir), is_directory=True)
    except RunStateError as error:
        raise ConfigError(error.message, hint=error.hint) from error


def _print_note_of_directory(state: RunState) -> None:
    """Print how to report all runs of a run's directory, if there are several."""
    from flagscale.launcher import runs

    count = len(runs.find_history(state.exp_dir))
    if count > 1:
        text = f"run {state.run_id} is one of {count} in {state.exp_dir}"
        command = f"flagscale report {shlex.quote(os.path.relpath(state.exp_dir))}"
        print(f"note: {text}; `{command}` shows all as one curve", file=sys.stderr)


def _print_completion(options: argparse.Namespace, _rest: list[str]) -> int:
    print(completion.script(options.shell), end="")
    return 0


def _print_version(_options: argparse.Namespace, _rest: list[str]) -> int:
    print(f"flagscale {__version__}")
    return 0


if __name__ == "__main__":
    main()
