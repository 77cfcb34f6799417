"""Requirements of tests beyond the launcher's packages, and the summary of skipped tests.

A test marked ``compiler``, ``root``, ``torch`` or ``lm_eval`` is skipped with the reason if the
requirement is missing, and so is a test that imports a package of the extras ``train``, ``bench``
and ``reference`` that is not installed. With ``FLAGSCALE_REQUIRE_COMPILER=1`` in the environment it
fails instead; likewise for the others.
"""

from __future__ import annotations

import os
import pty
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

# Packages of extras. The launcher uses none of them, so a missing one is an error in its tests.
EXTRAS = {"torch", "megatron", "numpy", "tokenizers", "transformers", "sentencepiece", "matplotlib"}
EXTRAS |= {"peft"}
LAUNCHER_DIRECTORIES = {"config", "hosts", "launcher", "liveness", "patching", "ssh"}

INSTALL_COMMAND = "make system"  # in a reason, like "needs root": the command that installs it


def skip_or_fail(need: str, reason: str) -> NoReturn:
    """Skip the running test, or fail it if FLAGSCALE_REQUIRE_<need> is 1."""
    variable = f"FLAGSCALE_REQUIRE_{need.upper()}"
    if os.environ.get(variable) == "1":
        pytest.fail(f"{variable}=1, but {reason}", pytrace=False)
    pytest.skip(reason)


def require_program(need: str, name: str) -> str:
    """Return the path of program ``name``, or skip the running test if it is not installed."""
    path = shutil.which(name, path=search_path())
    if path is None:
        skip_or_fail(need, f"no {name} on this machine ({INSTALL_COMMAND})")
    # Not through /bin if that is a link to /usr/bin: OpenMPI would derive the prefix `/`.
    return str(Path(path).parent.resolve() / name)


def open_terminal() -> tuple[int, int]:
    """Return the descriptors of a new pseudo-terminal, master first, or skip the running test."""
    try:
        return pty.openpty()
    except OSError as error:  # without /dev/pts: "out of pty devices"
        skip_or_fail("terminal", f"no pseudo-terminals on this machine (/dev/pts: {error})")


def explain_no_compiler() -> str | None:
    if shutil.which("g++") is None:
        return f"no C++ compiler on this machine ({INSTALL_COMMAND})"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return f"no headers of this Python ({INSTALL_COMMAND})"
    return None


def _explain_no_root() -> str | None:
    return "needs root" if os.geteuid() else None


def _explain_no_torch() -> str | None:
    return None if find_spec("torch") else "no torch in this environment"


def _explain_no_lm_eval() -> str | None:
    return None if find_spec("lm_eval") else "no lm_eval in this environment (extra `evaluate`)"


NEEDS: dict[str, Callable[[], str | None]] = {
    "compiler": explain_no_compiler,
    "root": _explain_no_root,
    "torch": _explain_no_torch,
    "lm_eval": _explain_no_lm_eval,
}
"""Function per requirement that returns the reason if it is missing, otherwise None."""


def _explain_missing_extra(error: BaseException | None, path: Path) -> str | None:
    """Return the reason if ``error`` is the import of an extra's package that is not installed."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    parts = path.relative_to(Path(__file__).parents[1]).parts
    if (
        name not in EXTRAS
        or LAUNCHER_DIRECTORIES & set(parts)
        or name in sys.modules
        or find_spec(name)
    ):
        return None
    return f"no {name} in this environment"


def require(name: str) -> None:
    """Skip the running test if one of :data:`NEEDS` is missing."""
    if reason := NEEDS[name]():
        skip_or_fail(name, reason)


@contextmanager
def _skip_missing_extras(path: Path) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if reason := _explain_missing_extra(error, path):
            pytest.skip(reason)
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    for name in NEEDS:
        if item.get_closest_marker(name):
            require(name)
    with _skip_missing_extras(item.path):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    with _skip_missing_extras(item.path):
        yield


class TestFile(pytest.Module):
    """Test file that is skipped if a package that it imports is not installed."""

    __test__ = False

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            return super().collect()
        except self.CollectError as error:
            if reason := _explain_missing_extra(error.__cause__, self.path):
                pytest.skip(reason, allow_module_level=True)
            raise


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return TestFile.from_parent(parent, path=module_path)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the reasons of skipped tests, and the command that installs the requirements."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)
    if not reasons:
        return
    terminalreporter.section(f"{len(skipped)} left out")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:5}  {reason}")
    if any("needs root" in reason for reason in reasons):
        terminalreporter.line("`make test`, as root on Debian or Ubuntu, installs and runs more.")
    elif any(INSTALL_COMMAND in reason for reason in reasons):
        terminalreporter.line(
            f"`{INSTALL_COMMAND}`, as root on Debian or Ubuntu, installs what is missing."
        )
