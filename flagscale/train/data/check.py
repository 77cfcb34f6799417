"""Whether this machine has the function that brings a run's data: what a preflight asks a host's
Python.

    python -m flagscale.train.data.check EXTERNAL_DATA

prints one line of JSON: ``found``, the file that the function is in, or ``problem`` and ``hint``.
Runs nothing of the user's and imports no torch: modules are looked up, and their source is parsed.
What cannot be told that way passes, for the ranks to find out.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

from flagscale.config.arguments.external import NO_MODULE, is_file, place
from flagscale.config.arguments.values import nearest


def check(text: str) -> dict[str, str]:
    """What the host answers for ``external_data: text``."""
    where, function = place(text)
    if is_file(where):
        source = Path(where)
        if not source.is_file():
            return {"problem": f"no file {where}", "hint": "copy it there"}
    else:
        spec = _spec(where)
        if spec is None:
            return {"problem": f"there is no module {where}", "hint": NO_MODULE}
        source = Path(spec.origin or "")
    return _function(source, where, function)


def _spec(name: str) -> ModuleSpec | None:
    """What is known of a module, without importing it or the packages that it lies in."""
    if name in sys.modules:
        return sys.modules[name].__spec__
    places: Sequence[str] | None = None
    found: ModuleSpec | None = None
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        if count > 1 and places is None:
            return None  # the part before is no package
        whole = ".".join(parts[:count])
        asked = (finder.find_spec(whole, places) for finder in sys.meta_path)
        found = next(filter(None, asked), None)
        if found is None:
            return None
        places = found.submodule_search_locations
    return found


def _function(source: Path, where: str, function: str) -> dict[str, str]:
    """Whether the source of a module binds a name."""
    if source.suffix != ".py":
        return {"found": where}
    try:
        tree = ast.parse(source.read_bytes(), str(source))
    except SyntaxError as error:
        return {"problem": f"{source}:{error.lineno}: {error.msg}", "hint": "mend it"}
    except (OSError, ValueError) as error:
        return {"problem": f"{source}: {error}", "hint": "let it be read"}
    names = list(_bound(tree.body))
    if {function, "*", "__getattr__"} & set(names):
        return {"found": str(source)}
    near = nearest(function, names)
    hint = f"did you mean {' or '.join(near)}?" if near else "write it there, or name another one"
    return {"problem": f"{where} has no function {function}", "hint": hint}


def _bound(body: Sequence[ast.AST]) -> Iterator[str]:
    """The names that statements of a module may bind, ``*`` for those of another module."""
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield statement.name  # what it binds inside is its own
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name for alias in statement.names)
        elif isinstance(statement, ast.Name) and isinstance(statement.ctx, ast.Store):
            yield statement.id
        else:
            yield from _bound(list(ast.iter_child_nodes(statement)))


def main(words: Sequence[str]) -> int:
    """Answer on standard output; the exit code."""
    print(json.dumps(check(*words)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
