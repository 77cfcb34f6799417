"""Preflight check on a host: does the function for a run's data (``external_data``) exist there?

    python -m flagscale.train.data.check EXTERNAL_DATA

prints one line of JSON: ``found``, the file of the function, or ``problem`` and ``hint``. It runs
no user code and imports no torch: modules are located and their source is parsed. A function that
cannot be checked this way passes; the ranks report an error in it.
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


def check_function(text: str) -> dict[str, str]:
    """Return the result of the check for ``external_data: text``."""
    module, function = parse_function_path(text)
    if is_python_file(module):
        source = Path(module)
        if not source.is_file():
            return {"problem": f"no file {module}", "hint": "copy it there"}
    else:
        spec = _find_spec(module)
        if spec is None:
            return {"problem": f"there is no module {module}", "hint": MODULE_HINT}
        source = Path(spec.origin or "")
    return _check_source(source, module, function)


def _find_spec(name: str) -> ModuleSpec | None:
    """Find the spec of a module without importing the module or its parent packages."""
    if name in sys.modules:
        return sys.modules[name].__spec__
    search_path: Sequence[str] | None = None
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        if count > 1 and search_path is None:
            return None  # the parent is not a package
        full_name = ".".join(parts[:count])
        specs = (finder.find_spec(full_name, search_path) for finder in sys.meta_path)
        spec = next(filter(None, specs), None)
        if spec is None:
            return None
        search_path = spec.submodule_search_locations
    return spec


def _check_source(source: Path, module: str, function: str) -> dict[str, str]:
    """Check whether the source of a module binds a name."""
    if source.suffix != ".py":
        return {"found": module}
    try:
        tree = ast.parse(source.read_bytes(), str(source))
    except SyntaxError as error:
        return {"problem": f"{source}:{error.lineno}: {error.msg}", "hint": "mend it"}
    except (OSError, ValueError) as error:
        return {"problem": f"{source}: {error}", "hint": "let it be read"}
    names = list(_iter_bound_names(tree.body))
    if {function, "*", "__getattr__"} & set(names):
        return {"found": str(source)}
    near = nearest_names(function, names)
    hint = f"did you mean {' or '.join(near)}?" if near else "write it there, or name another one"
    return {"problem": f"{module} has no function {function}", "hint": hint}


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
