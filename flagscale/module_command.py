"""Command line that runs a module in a new process. Uses the standard library alone."""

from __future__ import annotations

from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]


def python_arguments(module: str, project: Path = PROJECT) -> tuple[str, ...]:
    """Return the arguments of ``python`` that run a module.

    Of a module of the project in ``project`` they run ``main()``. An installed module is run like
    by ``python -m``, which itself would search the working directory first: that may contain
    another checkout with a package of the same name, or modules that shadow the standard library.
    """
    return (str(project / "flagscale" / "run_module.py"), module)
