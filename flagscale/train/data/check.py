"""Preflight check on a host: does the function for a run's data (``external_data``) exist there?

    python -m flagscale.train.data.check EXTERNAL_DATA

The launcher runs this on every host before it starts ranks
(:mod:`flagscale.launcher.preflight.user_code`). The output is one line of JSON: ``found``, the
file of the function, or ``problem`` and ``hint``. The check runs no user code and imports no torch:
modules are located and their source is parsed. A function that cannot be checked this way passes;
the ranks report an error in it.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

from flagscale.config.arguments.spec.paths import MODULE_HINT, is_python_file, parse_function_path
from flagscale.config.arguments.spec.values import nearest_names


def check_function(function_path: str) -> dict[str, str]:
    """Check the function that ``external_data`` names.

    Args:
        function_path: ``module:function`` or ``file.py:function``.

    Returns:
        ``found`` with the file, or ``problem`` and ``hint``.
    """
    module_name, function_name = parse_function_path(function_path)
    if is_python_file(module_name):
        source = Path(module_name)
        if not source.is_file():
            return {"problem": f"no file {module_name}", "hint": "copy it there"}
    else:
        spec = _find_spec(module_name)
        if spec is None:
            return {"problem": f"there is no module {module_name}", "hint": MODULE_HINT}
        source = Path(spec.origin or "")
    return _check_source(source, module_name, function_name)


def _find_spec(module_name: str) -> ModuleSpec | None:
    """Find the spec of a module without importing the module or its parent packages."""
    if module_name in sys.modules:
        return sys.modules[module_name].__spec__
    search_path: Sequence[str] | None = None
    spec: ModuleSpec | None = None
    parts = module_name.split(".")
    for part_count in range(1, len(parts) + 1):
        if part_count > 1 and search_path is None:
            return None  # the parent is not a package
        full_name = ".".join(parts[:part_count])
        specs = (finder.find_spec(full_name, search_path) for finder in sys.meta_path)
        spec = next(filter(None, specs), None)
        if spec is None:
            return None
        search_path = spec.submodule_search_locations
    return spec


def _check_source(source_file: Path, module_name: str, function_name: str) -> dict[str, str]:
    """Check whether the source of a module binds a name.

    Returns:
        The same as :func:`check_function`.
    """
    if source_file.suffix != ".py":
        return {"found": module_name}
    try:
        tree = ast.parse(source_file.read_bytes(), str(source_file))
    except SyntaxError as error:
        return {"problem": f"{source_file}:{error.lineno}: {error.msg}", "hint": "mend it"}
    except (OSError, ValueError) as error:
        return {"problem": f"{source_file}: {error}", "hint": "let it be read"}
    bound_names = list(_iter_bound_names(tree.body))
    if {function_name, "*", "__getattr__"} & set(bound_names):
        return {"found": str(source_file)}
    similar_names = nearest_names(function_name, bound_names)
    hint = (
        f"did you mean {' or '.join(similar_names)}?"
        if similar_names
        else "write it there, or name another one"
    )
    return {"problem": f"{module_name} has no function {function_name}", "hint": hint}


def _iter_bound_names(body: Sequence[ast.AST]) -> Iterator[str]:
    """Yield the names that statements of a module may bind; ``*`` for a star import."""
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield statement.name  # names bound inside are local to it
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name for alias in statement.names)
        elif isinstance(statement, ast.Name) and isinstance(statement.ctx, ast.Store):
            yield statement.id
        else:
            yield from _iter_bound_names(list(ast.iter_child_nodes(statement)))


def main(argv: Sequence[str]) -> int:
    """Print the result of :func:`check_function` as JSON; return the exit code."""
    print(json.dumps(check_function(*argv)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
