"""Check whether a host has the package that evaluation on tasks requires.

The preflight checks of the launcher run it in the Python of the host:

    python -m flagscale.train.evaluation.check

It prints one line of JSON: ``found`` with the version, or ``problem`` and ``hint``.
"""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version


def check_package() -> dict[str, str]:
    """Return the record to print."""
    try:
        return {"found": f"lm_eval {version('lm_eval')}"}
    except PackageNotFoundError:
        problem = "eval_tasks requires lm_eval, which is not installed"
        return {"problem": problem, "hint": "pip install 'flagscale[evaluate]' on this host"}


def main() -> int:
    print(json.dumps(check_package()))
    return 0


if __name__ == "__main__":
    main()
