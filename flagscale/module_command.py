"""Command line that runs a module of this project in a new process. Uses the standard library
alone.
"""

from __future__ import annotations

from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]


def python_arguments(module: str, project: Path = PROJECT) -> tuple[str, ...]:
    """Return the arguments of ``python`` that run ``main()`` of a module of the project in
    ``project``.

    ``python -m`` is not used: it searches the working directory first and then PYTHONPATH, and
    either may contain another checkout with a package of the same name.
    """
    call = f"from {module} import main; sys.exit(main())"
    return ("-c", f"import sys; sys.path[0] = sys.argv.pop(1); {call}", str(project))
