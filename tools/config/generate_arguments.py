"""Write the list of megatron.core's arguments from the source of its config dataclasses.

    python tools/config/generate_arguments.py [--source DIR] [--output FILE] [--check]

The source is read as text (``ast``), never imported: the list can be made, and later read, on a
machine without torch. Fields that only a program can fill in (callables, contexts, other objects)
are no arguments and are left out, as are those in :data:`DERIVED`.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import operator
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
OUTPUT = REPOSITORY / "flagscale/config/arguments/spec/generated/megatron_core.json"

SOURCES: tuple[tuple[str, str, str], ...] = (
    ("model_parallel_config.py", "ModelParallelConfig", "system"),
    ("transformer/transformer_config.py", "TransformerConfig", "model"),
    ("transformer/transformer_config.py", "MLATransformerConfig", "model"),
    ("optimizer/optimizer_config.py", "OptimizerConfig", "model"),
    ("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig", "system"),
    ("datasets/blended_megatron_dataset_config.py", "BlendedMegatronDatasetConfig", "data"),
    ("datasets/gpt_dataset.py", "GPTDatasetConfig", "data"),
)
"""File, class and section of the YAML, bases before what derives from them: of equal names the
first one counts, so that a plain transformer's defaults win over multi-latent attention's."""

DERIVED = frozenset(
    {
        "params_dtype",  # from bf16 and fp16
        "pipeline_dtype",
        "autocast_dtype",
        "random_seed",  # from seed
        "sequence_length",  # from seq_length
        "path_to_cache",  # from data_cache_path
        "blend",  # from data_path and its variants
        "blend_per_split",
        "data_parallel_size",  # from the world and the other sizes
        "sequence_parallel_size",
    }
)

_SCALARS = {"int": "int", "float": "float", "str": "str", "bool": "bool", "CudaGraphScope": "str"}
_DTYPES = ("fp32", "bf16", "fp16", "fp8")
_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Pow: operator.pow,
    ast.Mult: operator.mul,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Div: operator.truediv,
}
_DTYPE_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "uint8": "fp8"}


@dataclass(frozen=True)
class Shape:
    """What values a field takes. ``single`` also takes one value where ``many`` takes a list."""

    kind: str
    many: bool = False
    single: bool = False
    choices: tuple[str, ...] | None = None


def _parts(node: ast.expr) -> list[ast.expr]:
    """The members of a union, one level of ``Optional`` and ``Union`` after the other."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _parts(node.left) + _parts(node.right)
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) in ("Optional", "Union"):
        members = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        return [part for member in members for part in _parts(member)]
    if isinstance(node, ast.Constant) and node.value is None:
        return []
    return [node]


def _shape_of_part(node: ast.expr, enums: Mapping[str, tuple[str, ...]]) -> Shape | None:
    text = ast.unparse(node)
    if text in _SCALARS:
        return Shape(_SCALARS[text])
    if text in enums:
        return Shape("str", choices=enums[text])
    if text == "torch.dtype":
        return Shape("str", choices=_DTYPES)
    return _shape_of_container(node) if isinstance(node, ast.Subscript) else None


def _shape_of_container(node: ast.Subscript) -> Shape | None:
    head = ast.unparse(node.value).lower()
    members = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if head == "literal":
        return Shape("str", choices=tuple(str(ast.literal_eval(m)) for m in members))
    if head in ("list", "tuple") and ast.unparse(members[0]) in _SCALARS:
        return Shape(_SCALARS[ast.unparse(members[0])], many=True)
    return None


def shape(annotation: ast.expr, enums: Mapping[str, tuple[str, ...]]) -> Shape | None:
    """The shape of an annotated field; None where no command line could give its value."""
    found = [s for part in _parts(annotation) if (s := _shape_of_part(part, enums))]
    if not found:
        return None
    many = any(s.many for s in found)
    single = many and any(not s.many for s in found)
    return Shape(found[0].kind, many, single, found[0].choices)


def _value(node: ast.expr) -> Any:
    """A default's value: literals, arithmetic on them, ``torch.float32``, ``Enum.member``."""
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.Attribute):
        return _DTYPE_NAMES.get(node.attr, node.attr)
    return ast.literal_eval(node)


def _field_default(call: ast.Call) -> tuple[bool, Any]:
    """Return whether the ``__init__`` of the dataclass has the field of a ``field(...)`` call, and
    the default of the field.
    """
    options = {k.arg: k.value for k in call.keywords}
    if "init" in options and not ast.literal_eval(options["init"]):
        return False, None
    if "default_factory" in options:
        return True, []
    default = _value(options["default"]) if "default" in options else None
    if "metadata" in options and "'default': None" in ast.unparse(options["metadata"]):
        return True, None  # required on the command line; the dataclass's 0 stands for "not given"
    return True, default


def _default(node: ast.expr | None) -> tuple[bool, Any]:
    if isinstance(node, ast.Call):
        return _field_default(node)
    return True, None if node is None else _value(node)


def _documented(body: list[ast.stmt]) -> Iterator[tuple[ast.AnnAssign, str]]:
    """Each annotated field of a class with the string that follows it, in one line."""
    for position, statement in enumerate(body):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        text = ""
        after = body[position + 1] if position + 1 < len(body) else None
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            text = re.sub(r"\s+", " ", str(after.value.value)).strip()
        yield statement, text


def _enums(source: Path) -> dict[str, tuple[str, ...]]:
    """Enumerations that fields are annotated with, and their members' names."""
    tree = ast.parse((source / "transformer/enums.py").read_text(encoding="utf-8"))
    return {
        node.name: tuple(
            t.id
            for item in node.body
            if isinstance(item, ast.Assign)
            for t in item.targets
            if isinstance(t, ast.Name)
        )
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "AttnBackend"
    }


def _class_arguments(
    source: Path, file: str, name: str, section: str, enums: Mapping[str, tuple[str, ...]]
) -> Iterator[dict[str, Any]]:
    tree = ast.parse((source / file).read_text(encoding="utf-8"))
    body = next(n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    for statement, text in _documented(body):
        argument = statement.target.id  # type: ignore[union-attr]
        if argument.startswith("_") or argument in DERIVED:
            continue
        form = shape(statement.annotation, enums)
        if form is None:
            continue
        given, default = _default(statement.value)
        if not given:
            continue
        yield {
            "name": argument,
            "kind": form.kind,
            "default": default,
            "many": form.many,
            "single": form.single,
            "choices": form.choices,
            "class": name,
            "section": section,
            "doc": text,
        }


def version_of(source: Path) -> str:
    """megatron.core's version, from its ``package_info.py``."""
    text = (source / "package_info.py").read_text(encoding="utf-8")
    numbers = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)$", text, re.MULTILINE))
    return ".".join(numbers[part] for part in ("MAJOR", "MINOR", "PATCH"))


def generate(source: Path) -> str:
    """The list as JSON, one argument a line. ``source`` is the directory of megatron.core."""
    enums = _enums(source)
    found: dict[str, dict[str, Any]] = {}
    for file, name, section in SOURCES:
        for argument in _class_arguments(source, file, name, section, enums):
            found.setdefault(argument["name"], argument)
    lines = ",\n".join(json.dumps(argument) for argument in found.values())
    version = json.dumps(version_of(source))
    return f'{{"megatron_core": {version},\n"arguments": [\n{lines}\n]}}\n'


def installed_source() -> Path | None:
    """Where the installed megatron.core lies, without importing it."""
    spec = importlib.util.find_spec("megatron")
    roots = (spec.submodule_search_locations or ()) if spec else ()
    places = (Path(root) / "core" for root in roots)
    return next((p for p in places if (p / "model_parallel_config.py").is_file()), None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--source", type=Path, help="directory of megatron.core's source")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    options = parser.parse_args()
    source = options.source or installed_source()
    if source is None:
        print("megatron.core is not installed; name its source with --source", file=sys.stderr)
        return 2
    text = generate(source)
    if options.check:
        current = options.output.read_text(encoding="utf-8") if options.output.exists() else ""
        if current != text:
            print(f"{options.output} is out of date: run {Path(__file__).name}", file=sys.stderr)
            return 1
        return 0
    options.output.write_text(text, encoding="utf-8")
    print(f"{options.output}: {text.count(chr(10)) - 3} arguments")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
