"""Command line that runs a module of this project in a new process. Uses the standard library
alone.
"""

from __future__ import annotations

from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]

# Python puts the working directory (of `-c` and `-m`) and PYTHONPATH before the standard library. A
# random.py or queue.py there must not replace a module of the standard library, so its directories
# go first. Option -P, which does a part of this, needs Python 3.11.
_STANDARD_LIBRARY_FIRST = (
    'import os, sys; lib = os.path.dirname(os.__file__); '
    'sys.path[:] = [lib, f"{lib}/lib-dynload", *filter(None, sys.path)]'
)


def python_arguments(module: str, project: Path = PROJECT) -> tuple[str, ...]:
    """Return the arguments of ``python`` that run ``main()`` of a module of the project in
    ``project``.

    ``python -m`` is not used: it searches the working directory first and then PYTHONPATH, and
    either may contain another checkout with a package of the same name.
    """
    path = "sys.path.insert(2, sys.argv.pop(1))"
    call = f"from {module} import main; sys.exit(main())"
    return ("-c", f"{_STANDARD_LIBRARY_FIRST}; {path}; {call}", str(project))


def installed_module_arguments(module: str) -> tuple[str, ...]:
    """Return the arguments of ``python`` that run an installed module like ``python -m``, without
    searching the working directory.
    """
    call = 'runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)'
    return ("-c", f"{_STANDARD_LIBRARY_FIRST}; import runpy; {call}", module)
