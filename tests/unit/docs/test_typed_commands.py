"""Every command of the README and the guides, typed in a directory with the files that it names.

Commands that would start processes are typed as dry runs, with their overrides. Commands on runs
are typed for runs that have ended. Benchmarks and tools parse their command lines and do nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from support.tuning_answers import record_answer

from flagscale import cli
from flagscale.commands.health import add_health_arguments, select_hosts
from flagscale.config.actions import ACTIONS
from flagscale.config.load import load
from flagscale.files import write_json
from flagscale.launcher.actions import make_config_texts
from flagscale.launcher.layout import EXIT_FILE, STATUS_DIRECTORY, Layout
from flagscale.launcher.runners.base import runner_for_experiment
from flagscale.launcher.runs import RunEntry
from flagscale.launcher.state import RunState, make_state
from flagscale.launcher.sweep_runs import SweepRun, record_sweep
from flagscale.status import StatusWriter

PROJECT = Path(__file__).resolve().parents[3]
GUIDES = sorted([*(PROJECT / "docs" / "guides").glob("*.md"), PROJECT / "README.md"])

EXCEPTIONS = {
    "git clone <this repository>": "the address is the reader's",
    "cd flagscale": "the directory of the clone",
    ". .venv/bin/activate": "the environment that make setup creates",
    "cp -r examples/llama3/conf my_conf": "the result is the test's directory",
    "flagscale comm bench all_reduce --compare gloo,mylib": "a backend of the reader's",
    "kubectl create secret": "it needs a cluster",
    "torchfrtrace outputs/": "a program of torch, for the records of a hang",
    "torchrun --nproc-per-node 2 train.py": "a program of the reader's",
    "python examples/qwen3/": "run by tests/integration/launcher/test_finetuning_example.py",
    "python run.py --config-path ./examples/qwen3/conf": "run by the same test",
    "python run.py --config-path … --config-name train": "a schematic command",
    "flagscale train llama3 [--dryrun": "a schematic command",
}
"""Beginnings of commands that are not typed here, with the reason."""

PLANNED = ("run", "test", "dryrun", "check", "estimate")
"""Actions whose configuration a dry run can judge."""


def _shell_blocks(page: Path) -> Iterator[str]:
    """Yield the fenced blocks with commands; continued lines are joined.

    With prompts in a block, the lines without one are output.
    """
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^( *)```(\w*)\n(.*?)^ *```", text, re.M | re.S):
        if match[2] not in ("", "bash", "sh", "console"):
            continue
        lines = [line.removeprefix(match[1]) for line in match[3].splitlines()]
        if any(line.startswith("$ ") for line in lines):
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        yield re.sub(r"\\\n\s*", " ", "\n".join(lines))


def _inline_commands(page: Path) -> Iterator[str]:
    """Yield complete commands of the running text; names in capitals are placeholders."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for command in re.findall(r"`((?:flagscale|make) [^`]+)`", text):
        words = command.split()
        if not re.search(r"\b[A-Z]+\b|…", command) and (words[0] == "make" or len(words) > 3):
            yield command


def _commands() -> Iterator[Any]:
    seen = set()
    for page in GUIDES:
        lines = [line for block in _shell_blocks(page) for line in block.splitlines()]
        for line in [*lines, *_inline_commands(page)]:
            for part in line.split(" && "):
                words = tuple(shlex.split(part, comments=True))
                if words and words not in seen:
                    seen.add(words)
                    yield pytest.param(list(words), id=f"{page.stem}: {' '.join(words)[:60]}")


COMMANDS = list(_commands())


def _exception(words: list[str]) -> str | None:
    text = " ".join(words)
    return next((reason for start, reason in EXCEPTIONS.items() if text.startswith(start)), None)


@pytest.fixture(scope="module")
def guide_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with the files that the guides' commands name, and runs that have ended."""
    root = tmp_path_factory.mktemp("docs")
    shutil.copytree(PROJECT / "examples", root / "examples")
    for name in ("conf", "my_conf"):
        shutil.copytree(PROJECT / "examples" / "llama3" / "conf", root / name)
    shutil.copytree(PROJECT / "examples" / "llama3" / "conf" / "train", root / "train")
    shutil.copy(PROJECT / "examples" / "llama3" / "conf" / "train.yaml", root / "my.yaml")
    (root / "train.py").touch()
    (root / "hostfile").write_text("node[01-04] slots=8\n", encoding="utf-8")
    shutil.copy(
        PROJECT / "examples" / "command" / "conf" / "preprocess.yaml", root / "evaluate.yaml"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setenv("XDG_STATE_HOME", str(root / "state"))
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("TERM", "dumb")
        _record_ended_run("20261119-170000-aaaaaa", "outputs_earlier")
        _record_ended_run("20261120-085939-93ac1f", "outputs_llama3_tiny")
        _record_sweep("20261118-120000-aaaaaa", root / "outputs_sweep")
        record_answer(root / "outputs_llama3_tiny")
        yield root


def _record_ended_run(run_id: str, exp_dir: str) -> RunState:
    """Record a run of eight ranks that has ended, as a launcher and a host's agent do."""
    overrides = [f"exp_dir={exp_dir}", "nproc_per_node=8", "action=dryrun"]
    experiment = load(Path("conf").absolute(), "train", overrides).experiment
    plan = runner_for_experiment(experiment).plan(experiment)
    state = replace(make_state(plan), run_id=run_id, started=time.time() - 60)
    (host,) = state.hosts
    host.run_dir.mkdir(parents=True)
    ended = {"code": 0, "phase": "job", "ended": time.time() - 10}
    write_json(host.run_dir / EXIT_FILE, ended)
    lines = ("step 1/1 | loss 9.06", "WARNING: hot", "ERROR: too hot")
    output = "".join(f"localhost:{rank}: {line}\n" for rank in range(8) for line in lines)
    host.output.write_text(output)
    host.script.parent.mkdir()
    host.script.touch()
    files = Layout(state.exp_dir).run_files(run_id)
    files.directory.mkdir(parents=True)
    files.composed.write_text(make_config_texts(experiment).composed)
    state.save(Layout(state.exp_dir).state)
    RunEntry(state, str(Path("conf/train.yaml").absolute()), exp_dir, None).save()
    return state


def _record_sweep(run_id: str, directory: Path) -> None:
    """Record a sweep of one run, which has ended and has a loss."""
    values = {"train.model.seed": "1"}
    record_sweep(Path("conf/train.yaml"), [SweepRun(values=values, exp_dir=directory / "seed=1")])
    state = _record_ended_run(run_id, "outputs_sweep/seed=1")
    for rank in range(8):
        StatusWriter(state.hosts[0].run_dir / STATUS_DIRECTORY, rank).write("joined")
    StatusWriter(state.hosts[0].run_dir / STATUS_DIRECTORY, 0).write("progress", step=1, loss=1.0)


def _type(argv: list[str]) -> str:
    """Run a command line of ``flagscale`` in this process and return what it printed."""
    output, errors = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
        pytest.raises(SystemExit) as exit_error,
    ):
        cli.main(argv)
    assert exit_error.value.code == 0, f"{shlex.join(argv)}\n{errors.getvalue()}"
    return output.getvalue()


def _type_flagscale(words: list[str]) -> None:
    command, *rest = words
    if command == "run" and "-a" in rest:
        assert _type([command, *rest[: rest.index("-a")], "-a", "dryrun"])
    elif command == "train":
        assert _type([command, *rest, "--dryrun"])
    elif command == "tune":
        assert _type([command, *rest, "--dry"])
    elif command in PLANNED:
        assert _type(["dryrun", *rest])
    elif command == "rerun":
        assert _type([command, *rest, *(() if "--dryrun" in rest else ("--dryrun",))])
    elif command == "health":
        parser = argparse.ArgumentParser()
        add_health_arguments(parser)
        assert len(select_hosts(parser.parse_args(rest))[1]) in (4, 16)
    elif command in ("comm", "bench"):
        _parse_benchmark(command, rest)
    elif command == "convert":
        import_module("flagscale.train.checkpoint.formats.convert_options").build_parser(
            ""
        ).parse_args(rest)
    elif command == "evaluate":
        import_module("flagscale.train.evaluation.command_options").build_parser("").parse_args(
            rest
        )
    else:
        # `--open` would start a browser.
        assert _type([command, *(word for word in rest if word != "--open")])


def _parse_benchmark(group: str, words: list[str]) -> None:
    from flagscale.bench.cli import BENCH_COMMANDS, COMM_COMMANDS

    name, *rest = words
    prog = f"flagscale {group} {name}"
    module = import_module({"comm": COMM_COMMANDS, "bench": BENCH_COMMANDS}[group][name].module)
    if name == "traffic":
        from flagscale.bench.traffic.options import _parser

        _parser(prog).parse(rest)
    elif name == "training":
        from flagscale.bench.training.options import build_parser

        build_parser(prog).parse(rest)
    elif name == "list":
        assert rest in ([], ["--json"])  # it would import torch
    else:
        module.main.__self__.parse_plan(rest, prog, writes_results=False)


def _type_run_py(words: list[str]) -> None:
    from flagscale.launcher.entry import _parser

    options = _parser().parse_intermixed_args(words)
    config = Path(options.config_path, f"{options.config_name}.yaml")
    overrides = [text for text in options.overrides if not text.startswith("action=")]
    _type(["dryrun", str(config), *overrides])


def _parse_preprocess(words: list[str]) -> None:
    pytest.importorskip("numpy")
    path = PROJECT / "tools" / "data" / "preprocess.py"
    spec = importlib.util.spec_from_file_location("preprocess_command", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module._build_parser().parse_args(words)


def _parse_unpatch(words: list[str]) -> None:
    from flagscale.patching.cli import main_unpatch

    with contextlib.redirect_stdout(io.StringIO()):
        assert main_unpatch([*words, "--status"]) == 0


@cache
def _make_targets() -> frozenset[str]:
    makefile = (PROJECT / "Makefile").read_text(encoding="utf-8")
    return frozenset(re.findall(r"^([a-z][\w-]*):(?!=)", makefile, re.M))


def _find_make_target(words: list[str]) -> None:
    assert words[0] in _make_targets()


def _find_script(words: list[str]) -> None:
    """A script by hand has a name that a dry run prints, in the directory of its experiment."""
    assert Path(words[0]).name in _type(["dryrun", "conf/train.yaml"])


PROGRAMS: dict[tuple[str, ...], Callable[[list[str]], None]] = {
    ("flagscale",): _type_flagscale,
    ("python", "run.py"): _type_run_py,
    ("python", "tools/data/preprocess.py"): _parse_preprocess,
    ("python", "tools/patch/unpatch.py"): _parse_unpatch,
    ("make",): _find_make_target,
    ("bash",): _find_script,
}
"""Beginning of a command line, and the function that types its remaining words."""


@pytest.mark.parametrize("words", COMMANDS)
@pytest.mark.usefixtures("guide_directory")
def test_command_is_accepted(words: list[str]) -> None:
    if reason := _exception(words):
        pytest.skip(reason)
    programs = [start for start in PROGRAMS if tuple(words[: len(start)]) == start]
    assert programs, "no rule for this program: add one, or an exception with its reason"
    PROGRAMS[programs[0]](words[len(programs[0]) :])


@pytest.mark.usefixtures("guide_directory")
def test_actions_of_the_readme_take_their_options() -> None:
    readme = (PROJECT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `action=(\w+)`(?: \(`([^`]+)`\))? \|", readme, re.M)
    assert len(rows) >= 7
    for name, text in rows:
        assert name in ACTIONS
        options = [word.partition("=")[0] for word in text.split()]
        assert set(options) <= set(ACTIONS[name].options), name
        if ACTIONS[name].purpose == "find" and text:
            _type([name, "conf/train.yaml", *text.split()])


def test_exceptions_are_commands_of_the_guides() -> None:
    texts = [" ".join(parameter.values[0]) for parameter in COMMANDS]
    unused = [start for start in EXCEPTIONS if not any(t.startswith(start) for t in texts)]
    assert unused == []


def test_convert_knows_the_options_of_its_guide() -> None:
    from flagscale.train.checkpoint.formats.convert_options import build_parser

    page = (PROJECT / "docs" / "guides" / "convert-checkpoints.md").read_text(encoding="utf-8")
    known_options = set(re.findall(r"--[a-z-]+", build_parser("").format_help()))
    assert set(re.findall(r"`(--[a-z-]+)", page)) <= known_options
