"""Program that runs a module in a new process, in place of ``python -m``.

``python …/flagscale/run_module.py MODULE [ARGUMENT …]`` calls ``main()`` of a module of the
project to which this file belongs, or runs an installed module.

``python -m`` and PYTHONPATH put the working directory and others before the standard library, so
that a random.py or queue.py there would replace a module of the standard library. Here the standard
library goes first, then this project, then PYTHONPATH; the working directory is not searched.
(Python's option -P, which does a part of this, needs Python 3.11.)
"""

import os
import sys


def _main() -> None:
    library = os.path.dirname(os.__file__)  # noqa: PTH120 - pathlib may not be imported yet
    directory = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    project = os.path.dirname(directory)  # noqa: PTH120
    other_paths = [path for path in sys.path if path not in ("", directory)]
    sys.path[:] = [library, f"{library}/lib-dynload", project, *other_paths]
    import importlib
    import runpy

    name = sys.argv.pop(1)
    if name.startswith("flagscale."):
        sys.exit(importlib.import_module(name).main())
    runpy.run_module(name, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
