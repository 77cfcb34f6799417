"""Tests of the cache of a host's Python environment, run with this machine's bash and Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from flagscale.hosts import facts
from flagscale.hosts import python_environment as world
from flagscale.hosts.facts import HostQuery, PreflightQuery
from flagscale.hosts.program import parse_output
from flagscale.hosts.python_environment import PythonEnvironment

# A Python that logs each start.
PYTHON = """\
#!/bin/sh
echo started >>{log}
exec '{python}' "$@"
"""


@dataclass
class Machine:
    """A host with its own home, Python, package directory and project."""

    root: Path
    variables: dict[str, str]

    @property
    def packages(self) -> Path:
        return self.root / "packages"

    @property
    def project(self) -> Path:
        return self.root / "a project"

    @property
    def python(self) -> Path:
        return self.root / "bin" / "python"

    @property
    def cache_file(self) -> Path:
        (path,) = (self.root / "home" / ".cache" / "flagscale" / "hosts").iterdir()
        return path

    def install(self, package: str, where: str = "packages") -> None:
        (self.root / where / f"{package}.dist-info").mkdir(parents=True)

    def count_starts(self) -> int:
        """Return the number of times that Python was started."""
        log = self.root / "log"
        return len(log.read_text().splitlines()) if log.exists() else 0

    def make_query(self, **changes: object) -> HostQuery:
        preflight = PreflightQuery(str(self.project), "/", compare_code=True)
        return HostQuery(
            "",
            str(self.root),
            str(self.python),
            preflight=replace(preflight, **changes),  # type: ignore[arg-type]
        )

    def probe(self, query: HostQuery | None = None) -> PythonEnvironment | None:
        query = query or self.make_query()
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.root / "home")}
        result = subprocess.run(
            ["bash", "-c", facts.build_facts_program(query)],
            env={**environment, "PYTHONPATH": str(self.packages), **self.variables},
            capture_output=True,
            check=True,
        )
        return facts.parse_facts(parse_output(result.stdout), query, 0.0, 4e9).python


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path, {})
    machine.install("torch-2.0")
    machine.install("torch-3.0", "other")
    (tmp_path / "home").mkdir()
    machine.python.parent.mkdir()
    machine.python.write_text(PYTHON.format(log=tmp_path / "log", python=sys.executable))
    machine.python.chmod(0o755)
    package = machine.project / "flagscale"
    package.mkdir(parents=True)
    (package / "a.py").write_text("1")
    environment = machine.probe()
    assert machine.count_starts() == 1
    assert environment is not None
    assert environment.packages["torch"] == "2.0"
    assert environment.code
    assert machine.probe() == environment
    assert machine.count_starts() == 1
    assert machine.cache_file.stat().st_mode & 0o777 == 0o600
    assert machine.cache_file.parent.stat().st_mode & 0o777 == 0o700
    return machine


def swap_packages(machine: Machine) -> None:
    """Replace the packages by others that are older than the cache."""
    machine.packages.rename(machine.root / "before")
    (machine.root / "other").rename(machine.packages)


def edit_preserving_mtime(machine: Machine) -> None:
    path = machine.project / "flagscale" / "a.py"
    status = path.stat()
    path.write_text("2")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def write_cache(machine: Machine, data: bytes) -> None:
    machine.cache_file.write_bytes(data)


def replace_cache_by_directory(machine: Machine) -> None:
    cache_file = machine.cache_file
    cache_file.unlink()
    cache_file.mkdir()


def replace_cache_by_link(machine: Machine) -> None:
    """Replace the cache by a link to a valid file."""
    cache_file = machine.cache_file
    cache_file.rename(machine.root / "moved")
    cache_file.symlink_to(machine.root / "moved")


CHANGES: dict[str, Callable[[Machine], object]] = {
    "a package": lambda m: m.install("numpy-2.0"),
    "packages swapped": swap_packages,
    "packages gone": lambda m: shutil.rmtree(m.packages),
    "the interpreter": lambda m: m.python.write_text(m.python.read_text() + "\n"),
    "code, its time kept": edit_preserving_mtime,
    "new code": lambda m: (m.project / "flagscale" / "b.py").touch(),
    "code gone": lambda m: (m.project / "flagscale" / "a.py").unlink(),
    "PATH": lambda m: m.variables.update(PATH=f"/nowhere:{os.environ['PATH']}"),
    "PYTHONPATH": lambda m: m.variables.update(PYTHONPATH=str(m.root / "other")),
    "nothing kept": lambda m: m.cache_file.unlink(),
    "empty": lambda m: write_cache(m, b""),
    "noise": lambda m: write_cache(m, bytes(range(256)) * 9),
    "cut off": lambda m: write_cache(m, m.cache_file.read_bytes()[:-2]),
    "of another version": lambda m: write_cache(
        m, m.cache_file.read_bytes().replace(b"flagscale ", b"f ", 1)
    ),
    "a directory": replace_cache_by_directory,
    "writable for the group": lambda m: m.cache_file.chmod(0o620),
    "writable for others": lambda m: m.cache_file.chmod(0o602),
    "in a directory that others may write": lambda m: m.cache_file.parent.chmod(0o770),
    "a link": replace_cache_by_link,
}
FOR_ROOT: dict[str, Callable[[Machine], object]] = {
    "somebody else's": lambda m: os.chown(m.cache_file, 65534, -1),
    "in somebody else's directory": lambda m: os.chown(m.cache_file.parent, 65534, -1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_cache_is_ignored_after_a_change(machine: Machine, change: str) -> None:
    CHANGES[change](machine)
    environment = machine.probe()
    assert machine.count_starts() == 2
    assert environment is not None
    assert environment == machine.probe(machine.make_query(ignore_cache=True))


@pytest.mark.root  # only root may change the owner of files
@pytest.mark.parametrize("change", FOR_ROOT)
def test_cache_of_another_user_is_ignored(machine: Machine, change: str) -> None:
    FOR_ROOT[change](machine)
    machine.probe()
    assert machine.count_starts() == 2


def test_cache_is_rewritten(machine: Machine) -> None:
    machine.install("numpy-2.0")
    machine.probe()
    assert machine.probe() == machine.probe(machine.make_query(ignore_cache=True))
    assert machine.count_starts() == 3
    machine.probe()
    machine.probe(machine.make_query(compare_code=False))
    machine.probe()
    # Another query has another reply; there is one file per Python.
    assert machine.count_starts() == 5


def test_unwritable_cache_is_not_an_error(machine: Machine) -> None:
    for cache in ("/proc/nowhere", "relative", str(machine.python)):
        machine.variables["XDG_CACHE_HOME"] = cache
        assert machine.probe() is not None
    assert machine.count_starts() == 4
    machine.variables["XDG_CACHE_HOME"] = str(machine.root / "cache of mine")
    machine.probe()
    machine.probe()
    assert machine.count_starts() == 5


def test_activation_output_is_ignored(machine: Machine) -> None:
    setup = f'echo "= version of mine"; echo noise >&2; PATH={machine.python.parent}:$PATH'
    query = replace(machine.make_query(), python="python", setup=setup)
    first_environment = machine.probe(query)
    assert first_environment is not None
    assert first_environment.packages["torch"] == "2.0"
    assert machine.count_starts() == 2
    assert machine.probe(query) == first_environment
    assert machine.count_starts() == 2
    machine.python.write_text(machine.python.read_text() + "\n")
    machine.probe(query)
    assert machine.count_starts() == 3


def test_virtual_environments_and_pth_files_are_searched(machine: Machine) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", machine.root / "v"], check=True)
    python = machine.root / "v" / "bin" / "python"
    (site,) = (machine.root / "v" / "lib").glob("python*/site-packages")
    (site / "torch-5.0.dist-info").mkdir()
    (site / "more.pth").write_text(f"# comment\nimport os\n{machine.root / 'other'}\n")
    machine.install("numpy-9.9.9", "other")
    machine.variables["PYTHONPATH"] = ""
    query = replace(machine.make_query(compare_code=False), python=str(python))
    environment = machine.probe(query)
    assert environment is not None
    assert environment.executable == str(python)
    assert dict(environment.packages) == {"torch": "5.0", "numpy": "9.9.9"}
    (site / "more.pth").write_text("")
    changed_environment = machine.probe(query)
    assert changed_environment is not None
    assert dict(changed_environment.packages) == {"torch": "5.0"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("noise\n= package torch 1\n", None),
        ("= version 3.9.1\n= executable /a%25b%0Ac d\n", PythonEnvironment("3.9.1", "/a%b\nc d")),
        (
            'x\n= version 3\n= package torch 1+cu\n= code ab\n= answer ["a b", {"a": "%250A"}]\n',
            PythonEnvironment("3", "", {"torch": "1+cu"}, "ab", {"a b": {"a": "%0A"}}),
        ),
    ],
    ids=["empty", "no-version", "escapes", "all"],
)
def test_parse_environment(text: str, expected: PythonEnvironment | None) -> None:
    assert world.parse_environment(text) == expected
