"""Running a module of this project as a process of its own. Standard library alone."""

from __future__ import annotations

from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]


def started(module: str, project: Path = PROJECT) -> tuple[str, ...]:
    """What follows ``python`` to run ``main()`` of a module that lies in ``project``.

    With ``-m`` the working directory comes first and then PYTHONPATH, and either may hold a foreign
    checkout whose package has the same name.
    """
    run = f"from {module} import main; sys.exit(main())"
    return ("-c", f"import sys; sys.path[0] = sys.argv.pop(1); {run}", str(project))
