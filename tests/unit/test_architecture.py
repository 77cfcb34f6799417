"""Tests of the rules of docs/design/architecture.md: layers, imports, files that are read."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
from support.launch_lab import Lab

PROJECT = Path(__file__).resolve().parents[2]

# Top-level modules that any package may import.
COMMON = {
    *("errors", "files", "flight_records", "free_port", "memory_regions", "module_command"),
    *("object_storage", "records", "registry", "status"),
}
# Package or top-level module: those it may import. Imports in functions and for types count, too.
LAYERS = {
    **{
        name: set[str]()
        for name in ("errors", "files", "free_port", "memory_regions", "module_command", "status")
    },
    **{name: set[str]() for name in ("output_streams", "run_module")},
    "cli_errors": {"errors", "output_streams"},
    "subcommands": {"errors"},
    "records": {"errors", "files"},
    "after_torch": set(),
    "flight_records": {"files", "records"},
    "flight_reporter": {"files", "flight_records", "status"},
    "rank_hooks": {"after_torch", "flight_reporter"},
    "registry": {"errors"},
    "accelerators": {"errors", "registry", "status"},
    "sinks": {"errors", "files", "object_storage", "registry", "status"},
    "checkpoint_metadata": {"errors"},
    "object_storage": {"errors"},
    "checkpoints": {"checkpoint_metadata", "errors", "object_storage"},
    "tokenizer_files": {"errors"},
    "tables": set(),
    "config": {*COMMON, "accelerators", "sinks", "tokenizer_files"},
    "estimate": {*COMMON, "accelerators", "config", "tables"},
    "hosts": {*COMMON, "accelerators", "checkpoints", "cli_errors", "config"},
    "comm": {*COMMON, "accelerators", "after_torch"},
    "health": {*COMMON, "accelerators", "hosts"},
    "launcher": {
        *COMMON,
        "accelerators",
        "cli_errors",
        "checkpoints",
        "config",
        "estimate",
        "health",
        "hosts",
        "comm",
        "sinks",
        "output_streams",
        "tables",
        "tokenizer_files",
    },
    "train": {
        *COMMON,
        "accelerators",
        "tokenizer_files",
        "checkpoint_metadata",
        "checkpoints",
        "config",
        "estimate",
        "comm",
        "sinks",
        "flight_reporter",
        "health",
    },
    "tune": {
        *COMMON,
        "accelerators",
        "config",
        "estimate",
        "launcher",
        "output_streams",
        "tables",
    },
    "report": {*COMMON, "config", "health", "hosts", "launcher", "output_streams"},
    "bench": {
        *COMMON,
        "accelerators",
        "cli_errors",
        "subcommands",
        "hosts",
        "comm",
        "report",
        "config",
        "launcher",
        "api",
    },
    "patching": COMMON,
    "api": {*COMMON, "config", "launcher", "report"},
    "sweep": {*COMMON, "config", "launcher", "api", "output_streams"},
    "cli_suggestions": {"config"},
    "commands": {*COMMON, "accelerators", "config", "health", "hosts", "launcher", "api"},
    "cli": {
        *COMMON,
        "cli_errors",
        "cli_suggestions",
        "commands",
        "config",
        "launcher",
        "report",
        "bench",
        "patching",
    },
}
# The same for the modules of flagscale.report that render pages, whatever the pages are about.
PAGE_LAYERS = {
    "html": set[str](),
    "scale": set[str](),
    "figure": {"scale"},
    "frame": {"html"},
    "thin": {"scale"},
    "plot": {"html", "scale", "thin"},
}
# The same within flagscale.launcher: modules that execute a plan import planning, never vice versa.
PLANNING = {"layout", "liveness", "planning"}
LAUNCHER_LAYERS = {
    "layout": set[str](),
    "log_lines": set[str](),
    "liveness": {"layout"},
    "host_record": {"layout", "liveness"},
    "health_worker": {"liveness"},
    "metrics_server": {"layout", "liveness"},
    "agent": {"layout", "liveness", "metrics_server", "notify", "host_record", "health_worker"},
    "rank_processes": set(),
    "planning": {"layout", "liveness"},
    "state": PLANNING,
    "preflight": {*PLANNING, "state"},
    "plan_builder": {*PLANNING, "state"},
    "job_hosts": {*PLANNING, "state", "failures"},
    "snapshot": {*PLANNING, "state", "failures", "job_hosts"},
    "runners": {
        *PLANNING,
        "state",
        "preflight",
        "plan_builder",
        "log_lines",
        "snapshot",
        "failures",
        "job_hosts",
        "stop_result",
    },
}
# The same within flagscale.config.arguments: declarations, then rules, then heterogeneous jobs.
ARGUMENT_LAYERS = {
    "compat.unsupported_families": set[str](),
    "compat.names": {"compat.unsupported_families"},
    "spec": {"compat.names"},
    "compat.huggingface": {"spec"},
    "rules": {"spec", "compat.huggingface"},
    "hetero": {"spec", "rules"},
    "compat.unused": {"spec", "rules"},
    "layout": {"spec", "rules", "hetero"},
}
SLOW_IMPORTS = {"torch", "megatron", "numpy"}
# Packages that may import torch.
TORCH_PACKAGES = tuple(
    f"flagscale.{part}"
    for part in (
        *("accelerators", "train", "comm", "bench", "health.measure", "health.ranks"),
        *("checkpoints", "checkpoint_metadata", "flight_reporter"),
    )
)


def _modules() -> dict[str, Path]:
    modules = {}
    for path in (PROJECT / "flagscale").rglob("*.py"):
        parts = path.relative_to(PROJECT).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


MODULES = _modules()


def _imports(path: Path) -> Iterator[str]:
    """Yield imported modules, and names imported from modules, at any place of a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else str(node.module) for name in names)


@cache
def _imports_by_module() -> dict[str, set[str]]:
    """Return the imports of all modules. Called by tests: each worker collects this file."""
    return {name: set(_imports(path)) for name, path in MODULES.items()}


def _import_edges(package: str, parts: set[str]) -> dict[str, set[str]]:
    """Map each of ``parts`` of a package to the other parts of the package that it imports."""
    edges: dict[str, set[str]] = {part: set() for part in parts}
    for module, imports in _imports_by_module().items():
        part = _part(module, package)
        if part in edges:
            edges[part] |= {_part(imported, package) for imported in imports} - {part, ""}
    return edges


def _part(module: str, package: str) -> str:
    """Return the part of ``package`` that a module is in; empty for modules of other packages."""
    prefix = f"{package}."
    return module.removeprefix(prefix).partition(".")[0] if module.startswith(prefix) else ""


def _forbidden(edges: dict[str, set[str]], allowed: dict[str, set[str]]) -> dict[str, set[str]]:
    forbidden = {part: imports - allowed[part] for part, imports in edges.items()}
    return {part: imports for part, imports in forbidden.items() if imports}


def test_every_package_is_in_a_layer() -> None:
    assert {_part(module, "flagscale") for module in MODULES} - {""} == set(LAYERS)


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        pytest.param("flagscale", LAYERS, id="flagscale"),
        pytest.param("flagscale.launcher", LAUNCHER_LAYERS, id="launcher"),
        pytest.param("flagscale.report", PAGE_LAYERS, id="report"),
    ],
)
def test_imports_follow_the_layers(package: str, allowed: dict[str, set[str]]) -> None:
    assert _forbidden(_import_edges(package, set(allowed)), allowed) == {}


def _argument_layer(module: str) -> str:
    """Return the layer of config.arguments that a module is in; empty for other modules."""
    package = "flagscale.config.arguments."
    if not module.startswith(package):
        return ""
    name = f"{module.removeprefix(package)}."
    return next((layer for layer in ARGUMENT_LAYERS if name.startswith(f"{layer}.")), "")


def test_argument_packages_import_in_order() -> None:
    entry_modules = {f"flagscale.config.arguments.{name}" for name in ("check", "derive")}
    edges: dict[str, set[str]] = {layer: set() for layer in ARGUMENT_LAYERS}
    for module, imports in _imports_by_module().items():
        if layer := _argument_layer(module):
            edges[layer] |= {_argument_layer(imported) for imported in imports} - {layer, ""}
            assert not imports & entry_modules, module
    assert _forbidden(edges, ARGUMENT_LAYERS) == {}


def test_no_import_cycles() -> None:
    graph = {module: imports & MODULES.keys() for module, imports in _imports_by_module().items()}
    TopologicalSorter(graph).prepare()


def _imports_of(package: str) -> set[str]:
    modules = (name for name in MODULES if _part(name, "flagscale") == package)
    return {imported for name in modules for imported in _imports_by_module()[name]}


def test_train_imports_only_arguments_of_config() -> None:
    config = {name for name in _imports_of("train") if name.startswith("flagscale.config")}
    assert {name for name in config if not name.startswith("flagscale.config.arguments")} == set()


def test_page_elements_do_not_import_runs() -> None:
    """Benchmarks' pages use the elements, too, and nothing else of the package report."""
    elements = {f"flagscale.report.{name}" for name in PAGE_LAYERS}
    imports = {name for element in elements for name in _imports_by_module()[element]}
    imports = {name for name in imports if name.startswith("flagscale")}
    imports |= {name for name in _imports_of("bench") if _part(name, "flagscale") == "report"}
    allowed = {*elements, "flagscale.errors"}
    assert {name for name in imports if ".".join(name.split(".")[:3]) not in allowed} == set()


@pytest.mark.parametrize(
    ("library", "packages"),
    [
        pytest.param("paramiko", ("flagscale.hosts.ssh",), id="ssh"),
        pytest.param("torch", TORCH_PACKAGES, id="torch"),
        pytest.param("megatron", ("flagscale.train",), id="megatron"),
        pytest.param("hydra", ("flagscale.config",), id="hydra"),
        pytest.param("libcst", ("flagscale.patching",), id="libcst"),
    ],
)
def test_library_is_imported_only_by(library: str, packages: tuple[str, ...]) -> None:
    users = {
        module
        for module, imports in _imports_by_module().items()
        if library in {imported.partition(".")[0] for imported in imports}
    }
    prefixes = tuple(f"{package}." for package in packages)
    assert users
    assert {module for module in users if not f"{module}.".startswith(prefixes)} == set()


def test_agent_imports_only_the_standard_library() -> None:
    """It therefore starts fast, in the same Python as the training program."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); "
    code += "import flagscale.launcher.agent, flagscale.launcher.rank_processes"
    subprocess.run([sys.executable, "-I", "-S", "-c", code, str(PROJECT)], check=True)


# -- files and modules that commands load ----------------------------------------------------

PROGRAM = "print('hello')\n"
AUDITED_PROGRAM = """\
import collections, json, sys
opened = collections.Counter()
sys.addaudithook(lambda event, args: event == "open" and opened.update([str(args[0])]))
from pathlib import Path
results, sys.stdout = sys.stdout, sys.stderr
{call}
print(json.dumps([opened, sorted(sys.modules)]), file=results)
"""
DISPATCH = """\
from flagscale.launcher.entry import dispatch
assert dispatch(["--config-path", "conf", "--config-name", "lab", {arguments}]) == 0
"""
DISPATCH_ON_RUN = """\
from flagscale.errors import RunStateError
from flagscale.launcher.entry import dispatch
try:
    dispatch(["--config-path", "conf", "--config-name", "lab", {arguments}])
except RunStateError:
    pass  # no run was started
"""
LOAD = """\
from flagscale.config.load import load
experiment = load(Path("conf"), "lab", []).experiment
"""
PREPARE = """\
from flagscale.launcher.runners.base import runner_for_experiment
with runner_for_experiment(experiment).prepare(experiment, checking=True) as ready:
    assert ready.plan.hosts
"""


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """An experiment of two YAMLs and a hostfile."""
    lab = Lab(tmp_path, tmp_path / "exp")
    (tmp_path / "hosts").write_text("localhost slots=2\n", encoding="utf-8")
    envs = {"API_TOKEN": "s3cr3t", "MORE": "${host:HOME}/x"}
    lab.configure(PROGRAM, light=True, runner={"hostfile": "hosts"})
    path = tmp_path / "conf" / "lab.yaml"
    text = path.read_text(encoding="utf-8")
    path.write_text(f"defaults: [_self_, more: x]\n{text}", encoding="utf-8")
    more = tmp_path / "conf" / "more" / "x.yaml"
    more.parent.mkdir()
    more.write_text(f"# @package experiment.envs\n{json.dumps(envs)}\n", encoding="utf-8")
    yield lab
    lab.kill_processes()


def opened_files(lab: Lab, call: str) -> dict[str, int]:
    """Return how often a program opens each file of the lab."""
    counts = dict.fromkeys(("lab.yaml", "x.yaml", "hosts"), 0)
    for path, count in _audit(lab, call)[0].items():
        if Path(path).name in counts and Path(lab.root, path).is_relative_to(lab.root):
            counts[Path(path).name] += count
    return counts


def loaded_modules(lab: Lab, call: str) -> set[str]:
    return set(_audit(lab, call)[1])


def _audit(lab: Lab, call: str) -> tuple[dict[str, int], list[str]]:
    process = subprocess.run(
        [sys.executable, "-c", AUDITED_PROGRAM.format(call=call)],
        cwd=lab.root,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    opened, modules = json.loads(process.stdout)
    return opened, modules


def test_dry_run_loads_neither_torch_nor_ssh(lab: Lab) -> None:
    (lab.root / "hosts").write_text("node[01-16] slots=8\n", encoding="utf-8")
    modules = loaded_modules(lab, DISPATCH.format(arguments='"action=dryrun"'))
    packages = {name.partition(".")[0] for name in modules}
    assert packages & {*SLOW_IMPORTS, "paramiko", "rich"} == set()
    assert "yaml" in packages


@pytest.mark.parametrize("action", ["query", "logs", "stop"])
def test_commands_on_existing_runs_load_neither_rules_nor_model_families(
    lab: Lab, action: str
) -> None:
    call = DISPATCH_ON_RUN.format(arguments=f'"action={action}"')
    names = {name.removeprefix("flagscale.config.") for name in loaded_modules(lab, call)}
    unneeded = (
        "arguments.rules",
        "arguments.hetero",
        "arguments.check",
        "arguments.compat.huggingface",
        "checks",
        "placement",
    )
    assert {name for name in names if name.startswith(unneeded)} == set()
    assert "schema" in names


@pytest.mark.parametrize(
    ("call", "hostfile"),
    [
        pytest.param(DISPATCH.format(arguments='"action=dryrun"'), 1, id="dryrun"),
        pytest.param(DISPATCH.format(arguments='"--cfg", "job"'), 0, id="cfg"),
        # Checks of a configuration only test whether the hostfile exists.
        pytest.param(LOAD, 0, id="load"),
        pytest.param(LOAD + PREPARE, 1, id="run"),
    ],
)
def test_each_file_is_read_once_and_each_yaml_once_by_hydra(
    lab: Lab, call: str, hostfile: int
) -> None:
    assert opened_files(lab, call) == {"lab.yaml": 2, "x.yaml": 2, "hosts": hostfile}


def _without_random_parts(text: str) -> dict[str, Any]:
    """Return a plan without its run id and port, which differ between runs."""
    plan = json.loads(text)
    text = text.replace(plan["run_id"], "<run>").replace(str(plan["master_port"]), "1")
    return dict(json.loads(text))


@pytest.mark.torch  # it starts the training program
def test_dry_run_shows_the_scripts_that_a_run_starts(lab: Lab) -> None:
    printed = lab.run_action("dryrun", "json=true").stdout
    process = lab.run_action("test")
    assert process.returncode == 0, process.stderr
    saved = lab.layout.plan.read_text(encoding="utf-8")
    dry_run, started = _without_random_parts(printed), _without_random_parts(saved)
    # A dry run has notes on conditions that only the hosts could check.
    assert set(started.pop("notes")) <= set(dry_run.pop("notes"))
    assert dry_run == started
    assert all("s3cr3t" not in text for text in (printed, saved))
