"""What tests need beyond the launcher's own packages, and what a run left out.

A test marked ``compiler``, ``root`` or ``torch`` is skipped, with the reason, where there is none,
and so is a test that imports a package of the extras ``train``, ``bench`` and ``reference`` where
that is not installed. With ``FLAGSCALE_REQUIRE_COMPILER=1`` in the environment it fails; so for
other needs.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import pytest
from bed.namespaces import search_path

# What extras bring. What launches needs none of it, so there it is a mistake.
EXTRAS = {"torch", "megatron", "numpy", "tokenizers", "transformers", "sentencepiece", "matplotlib"}
EXTRAS |= {"peft"}
LAUNCHING = {"config", "hosts", "launcher", "liveness", "patching", "ssh"}

SYSTEM = "make system"  # in a reason, as "needs root" is: what brings it


def leave_out(need: str, reason: str) -> NoReturn:
    """Skip the running test; fail it where FLAGSCALE_REQUIRE_<need> is 1."""
    variable = f"FLAGSCALE_REQUIRE_{need.upper()}"
    if os.environ.get(variable) == "1":
        pytest.fail(f"{variable}=1, but {reason}", pytrace=False)
    pytest.skip(reason)


def need_program(need: str, name: str) -> str:
    """The path of program ``name``; the running test is left out where it is not installed."""
    found = shutil.which(name, path=search_path())
    if found is None:
        leave_out(need, f"no {name} on this machine ({SYSTEM})")
    # Not by /bin where that is a link to /usr/bin: OpenMPI would take `/` for its prefix.
    return str(Path(found).parent.resolve() / name)


def why_no_compiler() -> str | None:
    if shutil.which("g++") is None:
        return f"no C++ compiler on this machine ({SYSTEM})"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return f"no headers of this Python ({SYSTEM})"
    return None


def _why_no_root() -> str | None:
    return "needs root" if os.geteuid() else None


def _why_no_torch() -> str | None:
    return None if find_spec("torch") else "no torch in this environment"


NEEDS: dict[str, Callable[[], str | None]] = {
    "compiler": why_no_compiler,
    "root": _why_no_root,
    "torch": _why_no_torch,
}


def _absent(error: BaseException | None, path: Path) -> str | None:
    """The package of an extra that ``error`` says is not installed."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    here = path.relative_to(Path(__file__).parents[1]).parts
    if name not in EXTRAS or LAUNCHING & set(here) or name in sys.modules or find_spec(name):
        return None
    return f"no {name} in this environment"


def need(name: str) -> None:
    """Leave the running test out where one of :data:`NEEDS` is missing."""
    if reason := NEEDS[name]():
        leave_out(name, reason)


@contextmanager
def _excused(path: Path) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if reason := _absent(error, path):
            pytest.skip(reason)
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    for name in NEEDS:
        if item.get_closest_marker(name):
            need(name)
    with _excused(item.path):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    with _excused(item.path):
        yield


class TestFile(pytest.Module):
    """A file whose tests are left out where a package that it imports is not installed."""

    __test__ = False

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            return super().collect()
        except self.CollectError as error:
            if reason := _absent(error.__cause__, self.path):
                pytest.skip(reason, allow_module_level=True)
            raise


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return TestFile.from_parent(parent, path=module_path)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was left out, and the one command that gets it."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)
    if not reasons:
        return
    terminalreporter.section(f"{len(skipped)} left out")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:5}  {reason}")
    if any("needs root" in reason for reason in reasons):
        terminalreporter.line("`make test`, as root on Debian or Ubuntu, installs and runs more.")
    elif any(SYSTEM in reason for reason in reasons):
        terminalreporter.line(f"`{SYSTEM}`, as root on Debian or Ubuntu, installs what is missing.")
