"""What a host keeps of its Python's answer, and when it is believed: run by this machine's bash
and Python."""

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
from flagscale.hosts import python_world as world
from flagscale.hosts.facts import Need, Question
from flagscale.hosts.program import parse
from flagscale.hosts.python_world import World

# Counts how often it is started.
PYTHON = """\
#!/bin/sh
echo started >>{log}
exec '{python}' "$@"
"""


@dataclass
class Machine:
    """A host with a home, a Python, a directory of packages and a project of its own."""

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
    def kept(self) -> Path:
        (path,) = (self.root / "home" / ".cache" / "flagscale" / "hosts").iterdir()
        return path

    def install(self, package: str, where: str = "packages") -> None:
        (self.root / where / f"{package}.dist-info").mkdir(parents=True)

    def asked(self) -> int:
        """How often Python was started."""
        log = self.root / "log"
        return len(log.read_text().splitlines()) if log.exists() else 0

    def question(self, **changes: object) -> Question:
        need = Need(str(self.project), "/", compared=True)
        return Question(
            "",
            str(self.root),
            str(self.python),
            need=replace(need, **changes),  # type: ignore[arg-type]
        )

    def look(self, question: Question | None = None) -> World | None:
        question = question or self.question()
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.root / "home")}
        done = subprocess.run(
            ["bash", "-c", facts.text(question)],
            env={**environment, "PYTHONPATH": str(self.packages), **self.variables},
            capture_output=True,
            check=True,
        )
        return facts.read(parse(done.stdout), question, 0.0, 4e9).python


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path, {})
    made.install("torch-2.0")
    made.install("torch-3.0", "other")
    (tmp_path / "home").mkdir()
    made.python.parent.mkdir()
    made.python.write_text(PYTHON.format(log=tmp_path / "log", python=sys.executable))
    made.python.chmod(0o755)
    package = made.project / "flagscale"
    package.mkdir(parents=True)
    (package / "a.py").write_text("1")
    found = made.look()
    assert made.asked() == 1
    assert found is not None
    assert found.packages["torch"] == "2.0"
    assert found.code
    assert made.look() == found
    assert made.asked() == 1
    assert made.kept.stat().st_mode & 0o777 == 0o600
    assert made.kept.parent.stat().st_mode & 0o777 == 0o700
    return made


def swap(machine: Machine) -> None:
    """Packages that are older than the answer take the place of those that it was made from."""
    machine.packages.rename(machine.root / "before")
    (machine.root / "other").rename(machine.packages)


def edit_with_its_time_kept(machine: Machine) -> None:
    path = machine.project / "flagscale" / "a.py"
    status = path.stat()
    path.write_text("2")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def garble(machine: Machine, data: bytes) -> None:
    machine.kept.write_bytes(data)


def make_directory(machine: Machine) -> None:
    kept = machine.kept
    kept.unlink()
    kept.mkdir()


def elsewhere(machine: Machine) -> None:
    """A file that is right, at the end of a link."""
    kept = machine.kept
    kept.rename(machine.root / "moved")
    kept.symlink_to(machine.root / "moved")


CHANGES: dict[str, Callable[[Machine], object]] = {
    "a package": lambda m: m.install("numpy-2.0"),
    "packages swapped": swap,
    "packages gone": lambda m: shutil.rmtree(m.packages),
    "the interpreter": lambda m: m.python.write_text(m.python.read_text() + "\n"),
    "code, its time kept": edit_with_its_time_kept,
    "new code": lambda m: (m.project / "flagscale" / "b.py").touch(),
    "code gone": lambda m: (m.project / "flagscale" / "a.py").unlink(),
    "PATH": lambda m: m.variables.update(PATH=f"/nowhere:{os.environ['PATH']}"),
    "PYTHONPATH": lambda m: m.variables.update(PYTHONPATH=str(m.root / "other")),
    "nothing kept": lambda m: m.kept.unlink(),
    "empty": lambda m: garble(m, b""),
    "noise": lambda m: garble(m, bytes(range(256)) * 9),
    "cut off": lambda m: garble(m, m.kept.read_bytes()[:-2]),
    "of another version": lambda m: garble(m, m.kept.read_bytes().replace(b"flagscale ", b"f ", 1)),
    "a directory": make_directory,
    "writable for the group": lambda m: m.kept.chmod(0o620),
    "writable for others": lambda m: m.kept.chmod(0o602),
    "in a directory that others may write": lambda m: m.kept.parent.chmod(0o770),
    "a link": elsewhere,
}
FOR_ROOT: dict[str, Callable[[Machine], object]] = {
    "somebody else's": lambda m: os.chown(m.kept, 65534, -1),
    "in somebody else's directory": lambda m: os.chown(m.kept.parent, 65534, -1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_python_is_asked_again_after_a_change(machine: Machine, change: str) -> None:
    CHANGES[change](machine)
    found = machine.look()
    assert machine.asked() == 2
    assert found is not None
    assert found == machine.look(machine.question(fresh=True))


@pytest.mark.root  # who else may give files away
@pytest.mark.parametrize("change", FOR_ROOT)
def test_nobody_elses_word_is_taken(machine: Machine, change: str) -> None:
    FOR_ROOT[change](machine)
    machine.look()
    assert machine.asked() == 2


def test_what_is_asked_again_is_kept_again(machine: Machine) -> None:
    machine.install("numpy-2.0")
    machine.look()
    assert machine.look() == machine.look(machine.question(fresh=True))
    assert machine.asked() == 3
    machine.look()
    machine.look(machine.question(compared=False))
    machine.look()
    # Another question has another answer; one file is kept a Python.
    assert machine.asked() == 5


def test_a_cache_that_cannot_be_written_costs_no_more_than_time(machine: Machine) -> None:
    for cache in ("/proc/nowhere", "relative", str(machine.python)):
        machine.variables["XDG_CACHE_HOME"] = cache
        assert machine.look() is not None
    assert machine.asked() == 4
    machine.variables["XDG_CACHE_HOME"] = str(machine.root / "cache of mine")
    machine.look()
    machine.look()
    assert machine.asked() == 5


def test_an_activation_may_print_and_names_the_python(machine: Machine) -> None:
    setup = f'echo "= version of mine"; echo noise >&2; PATH={machine.python.parent}:$PATH'
    question = replace(machine.question(), python="python", setup=setup)
    first = machine.look(question)
    assert first is not None
    assert first.packages["torch"] == "2.0"
    assert machine.asked() == 2
    assert machine.look(question) == first
    assert machine.asked() == 2
    machine.python.write_text(machine.python.read_text() + "\n")
    machine.look(question)
    assert machine.asked() == 3


def test_virtual_environments_and_paths_of_packages_are_searched(machine: Machine) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", machine.root / "v"], check=True)
    python = machine.root / "v" / "bin" / "python"
    (site,) = (machine.root / "v" / "lib").glob("python*/site-packages")
    (site / "torch-5.0.dist-info").mkdir()
    (site / "more.pth").write_text(f"# comment\nimport os\n{machine.root / 'other'}\n")
    machine.install("numpy-9.9.9", "other")
    machine.variables["PYTHONPATH"] = ""
    question = replace(machine.question(compared=False), python=str(python))
    found = machine.look(question)
    assert found is not None
    assert found.executable == str(python)
    assert dict(found.packages) == {"torch": "5.0", "numpy": "9.9.9"}
    (site / "more.pth").write_text("")
    changed = machine.look(question)
    assert changed is not None
    assert dict(changed.packages) == {"torch": "5.0"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("noise\n= package torch 1\n", None),
        ("= version 3.9.1\n= executable /a%25b%0Ac d\n", World("3.9.1", "/a%b\nc d")),
        (
            'x\n= version 3\n= package torch 1+cu\n= code ab\n= answer ["a b", {"a": "%250A"}]\n',
            World("3", "", {"torch": "1+cu"}, "ab", {"a b": {"a": "%0A"}}),
        ),
    ],
    ids=["empty", "no-version", "escapes", "all"],
)
def test_reading_an_answer(text: str, expected: World | None) -> None:
    assert world.read(text) == expected
