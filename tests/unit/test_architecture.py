"""The promises of docs/architecture.md that a machine can hold the code to."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
from support.launch_lab import Lab

PROJECT = Path(__file__).resolve().parents[2]
LINES = 410
SOURCES = (".py", ".sh", ".h", ".cpp", ".cu")

# The packages that each part may import, at the top of a module, in a function or for types alone.
GROUND = {"errors", "files", "modules", "records", "registry", "status"}
PARTS = {
    **{name: set[str]() for name in ("errors", "files", "modules", "sample_statistics", "status")},
    "cli_errors": {"errors"},
    "subcommands": {"errors"},
    "records": {"errors", "files"},
    "registry": {"errors"},
    "accelerators": {"errors", "registry", "status"},
    "checkpoint_metadata": {"errors"},
    "checkpoints": {"checkpoint_metadata", "errors"},
    "config": {*GROUND, "accelerators"},
    "estimate": {*GROUND, "accelerators", "config"},
    "hosts": {*GROUND, "accelerators", "checkpoints", "config"},
    "comm": {*GROUND, "accelerators"},
    "launcher": {
        *GROUND,
        "accelerators",
        "cli_errors",
        "checkpoints",
        "config",
        "estimate",
        "hosts",
        "comm",
    },
    "train": {
        *GROUND,
        "accelerators",
        "checkpoint_metadata",
        "checkpoints",
        "config",
        "estimate",
        "comm",
    },
    "report": {*GROUND, "config", "hosts", "launcher"},
    "bench": {
        *GROUND,
        "accelerators",
        "cli_errors",
        "subcommands",
        "hosts",
        "comm",
        "sample_statistics",
        "report",
        "config",
        "launcher",
        "api",
    },
    "patching": GROUND,
    "api": {*GROUND, "config", "launcher", "report"},
    "sweep": {*GROUND, "config", "launcher", "api"},
    "cli": {*GROUND, "cli_errors", "config", "launcher", "report", "bench", "patching"},
}
# What pages are made of, whatever they are of, and what of it each part takes.
PAGES = {
    "html": set[str](),
    "scale": set[str](),
    "figure": {"scale"},
    "frame": {"html"},
    "thin": {"scale"},
    "plot": {"html", "scale", "thin"},
}
# Inside launcher: from a plan to what is done with it, never back.
PLANNED = {"layout", "liveness", "planning"}
LAUNCHER = {
    "layout": set[str](),
    "liveness": {"layout"},
    "agent": {"layout", "liveness", "notify"},
    "rank_processes": set(),
    "planning": {"layout", "liveness"},
    "state": PLANNED,
    "preflight": {*PLANNED, "state"},
    "plan_builder": {*PLANNED, "state"},
    "snapshot": {*PLANNED, "state", "failures"},
    "runners": {
        *PLANNED,
        "state",
        "preflight",
        "plan_builder",
        "snapshot",
        "failures",
        "stop_result",
    },
}
HEAVY = {"torch", "megatron", "numpy"}
TORCH = tuple(
    f"flagscale.{part}"
    for part in (
        *("accelerators", "train", "comm", "bench"),
        *("checkpoints", "checkpoint_metadata"),
    )
)


def _modules() -> dict[str, Path]:
    found = {}
    for path in (PROJECT / "flagscale").rglob("*.py"):
        parts = path.relative_to(PROJECT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()


def _imports(path: Path) -> Iterator[str]:
    """What a file imports, anywhere in it: a module's name, or what is taken from one."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else str(node.module) for name in names)


GRAPH = {name: set(_imports(path)) for name, path in MODULES.items()}


def _edges(above: str, names: set[str]) -> dict[str, set[str]]:
    """What the parts below a package import of each other; ``names`` are the parts to look at."""
    found: dict[str, set[str]] = {name: set() for name in names}
    for module, imported in GRAPH.items():
        part = _part(module, above)
        if part in found:
            found[part] |= {other for one in imported if (other := _part(one, above))} - {part}
    return found


def _part(module: str, above: str) -> str:
    start = f"{above}."
    return module.removeprefix(start).partition(".")[0] if module.startswith(start) else ""


def test_every_part_has_its_place() -> None:
    assert {_part(module, "flagscale") for module in MODULES} - {""} == set(PARTS)


@pytest.mark.parametrize(
    ("above", "allowed"),
    [("flagscale", PARTS), ("flagscale.launcher", LAUNCHER), ("flagscale.report", PAGES)],
)
def test_imports_point_one_way(above: str, allowed: dict[str, set[str]]) -> None:
    edges = _edges(above, set(allowed))
    astray = {name: found - allowed[name] for name, found in edges.items()}
    assert {name: found for name, found in astray.items() if found} == {}


def test_no_modules_import_each_other_in_a_circle() -> None:
    TopologicalSorter({name: found & MODULES.keys() for name, found in GRAPH.items()}).prepare()


def test_training_takes_of_the_configuration_its_arguments_alone() -> None:
    taken = {one for name in MODULES if _part(name, "flagscale") == "train" for one in GRAPH[name]}
    config = {one for one in taken if one.startswith("flagscale.config")}
    assert {one for one in config if not one.startswith("flagscale.config.arguments")} == set()


def test_what_pages_are_made_of_knows_nothing_of_runs() -> None:
    made_of = {f"flagscale.report.{name}" for name in PAGES}
    taken = {one for name in made_of for one in GRAPH[name] if one.startswith("flagscale")}
    measuring = {name for name in MODULES if _part(name, "flagscale") == "bench"}
    taken |= {
        one for name in measuring for one in GRAPH[name] if _part(one, "flagscale") == "report"
    }
    allowed = {*made_of, "flagscale.errors"}
    assert {one for one in taken if ".".join(one.split(".")[:3]) not in allowed} == set()


@pytest.mark.parametrize(
    ("package", "only"),
    [
        pytest.param("paramiko", ("flagscale.hosts.ssh",), id="ssh"),
        pytest.param("torch", TORCH, id="torch"),
        pytest.param("megatron", ("flagscale.train",), id="megatron"),
        pytest.param("hydra", ("flagscale.config",), id="hydra"),
        pytest.param("libcst", ("flagscale.patching",), id="libcst"),
    ],
)
def test_only_one_part_knows(package: str, only: tuple[str, ...]) -> None:
    users = {
        name for name, found in GRAPH.items() if package in {one.partition(".")[0] for one in found}
    }
    rooms = tuple(f"{room}." for room in only)
    assert users
    assert {name for name in users if not f"{name}.".startswith(rooms)} == set()


def test_what_supervises_ranks_needs_the_standard_library_alone() -> None:
    """So the agent starts fast, and in whatever Python trains."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); "
    code += "import flagscale.launcher.agent, flagscale.launcher.rank_processes"
    subprocess.run([sys.executable, "-I", "-S", "-c", code, str(PROJECT)], check=True)


def test_no_file_is_long() -> None:
    files = [path for top in ("flagscale", "tools") for path in (PROJECT / top).rglob("*")]
    counts = {
        str(path.relative_to(PROJECT)): path.read_text(encoding="utf-8").count("\n")
        for path in files
        if path.suffix in SOURCES
    }
    assert {path: count for path, count in counts.items() if count > LINES} == {}


# -- the walk of the data ---------------------------------------------------------------------

PROGRAM = "print('hello')\n"
WATCHED = """\
import collections, json, sys
opened = collections.Counter()
sys.addaudithook(lambda event, found: event == "open" and opened.update([str(found[0])]))
from pathlib import Path
shown, sys.stdout = sys.stdout, sys.stderr
{call}
print(json.dumps([opened, sorted(sys.modules)]), file=shown)
"""
ACT = """\
from flagscale.launcher.entry import dispatch
assert dispatch(["--config-path", "conf", "--config-name", "lab", {words}]) == 0
"""
LOAD = """\
from flagscale.config.load import load
experiment = load(Path("conf"), "lab", []).experiment
"""
PREPARE = """\
from flagscale.launcher.runners.base import runner_for
with runner_for(experiment).prepare(experiment, checking=True) as ready:
    assert ready.plan.hosts
"""


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """An experiment of two YAMLs and a hostfile."""
    made = Lab(tmp_path, tmp_path / "exp")
    (tmp_path / "hosts").write_text("localhost slots=2\n", encoding="utf-8")
    envs = {"API_TOKEN": "s3cr3t", "MORE": "${host:HOME}/x"}
    made.configure(PROGRAM, light=True, runner={"hostfile": "hosts"})
    path = tmp_path / "conf" / "lab.yaml"
    text = path.read_text(encoding="utf-8")
    path.write_text(f"defaults: [_self_, more: x]\n{text}", encoding="utf-8")
    more = tmp_path / "conf" / "more" / "x.yaml"
    more.parent.mkdir()
    more.write_text(f"# @package experiment.envs\n{json.dumps(envs)}\n", encoding="utf-8")
    yield made
    made.clear()


def watched(lab: Lab, call: str) -> tuple[dict[str, int], set[str]]:
    """How often a program opened the lab's files, and the packages that it loaded."""
    done = subprocess.run(
        [sys.executable, "-c", WATCHED.format(call=call)],
        cwd=lab.root,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    opened, modules = json.loads(done.stdout)
    counts = dict.fromkeys(("lab.yaml", "x.yaml", "hosts"), 0)
    for path, count in opened.items():
        if Path(path).name in counts and Path(lab.root, path).is_relative_to(lab.root):
            counts[Path(path).name] += count
    return counts, {name.partition(".")[0] for name in modules}


def test_a_dry_run_loads_nothing_that_training_or_reaching_hosts_needs(lab: Lab) -> None:
    (lab.root / "hosts").write_text("node[01-16] slots=8\n", encoding="utf-8")
    _, packages = watched(lab, ACT.format(words='"action=dryrun"'))
    assert packages & {*HEAVY, "paramiko", "rich"} == set()
    assert "yaml" in packages


@pytest.mark.parametrize(
    ("call", "hostfile"),
    [
        pytest.param(ACT.format(words='"action=dryrun"'), 1, id="dryrun"),
        pytest.param(ACT.format(words='"--cfg", "job"'), 0, id="cfg"),
        # Checking a configuration looks whether it is there.
        pytest.param(LOAD, 0, id="load"),
        pytest.param(LOAD + PREPARE, 1, id="run"),
    ],
)
def test_a_file_is_read_once_by_us_and_a_yaml_once_by_hydra(
    lab: Lab, call: str, hostfile: int
) -> None:
    assert watched(lab, call)[0] == {"lab.yaml": 2, "x.yaml": 2, "hosts": hostfile}


def _without_chance(text: str) -> dict[str, Any]:
    """A plan as JSON without what differs from run to run."""
    plan = json.loads(text)
    named = text.replace(plan["run_id"], "<run>").replace(str(plan["master_port"]), "1")
    return dict(json.loads(named))


@pytest.mark.torch  # it really starts what was shown
def test_what_a_dry_run_shows_is_what_is_started(lab: Lab) -> None:
    shown = lab.do("dryrun", "json=true").stdout
    done = lab.do("test")
    assert done.returncode == 0, done.stderr
    started = lab.layout.plan.read_text(encoding="utf-8")
    plans = [_without_chance(text) for text in (shown, started)]
    notes = [set(plan.pop("notes")) for plan in plans]
    assert plans[0] == plans[1]
    # What only a host can tell is told of by a dry run.
    assert notes[1] <= notes[0]
    assert all("s3cr3t" not in text for text in (shown, started))
