"""Registry of arguments: complete, up to date with megatron.core, and consistent."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from flagscale.config.arguments.compat.names import ALIASES, why_unsupported
from flagscale.config.arguments.spec.registry import (
    BOUNDS,
    aliases,
    arguments,
    canonical_name,
    closest_names,
    lookup,
    registry,
)

REPOSITORY = Path(__file__).resolve().parents[3]


def _load_generator() -> ModuleType:
    path = REPOSITORY / "tools" / "config" / "generate_arguments.py"
    spec = importlib.util.spec_from_file_location("generate_arguments", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_registry_matches_installed_core() -> None:
    generator = _load_generator()
    source = generator.installed_source()
    if source is None:
        pytest.skip("megatron.core is not installed")
    assert generator.OUTPUT.read_text(encoding="utf-8") == generator.generate(source)


def test_generator_check_detects_stale_file(tmp_path: Path) -> None:
    tool = REPOSITORY / "tools" / "config" / "generate_arguments.py"
    stale = tmp_path / "list.json"
    stale.write_text("{}")
    command = [sys.executable, str(tool), "--check", "--output", str(stale)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode in (1, 2)
    assert "out of date" in result.stderr or "not installed" in result.stderr


def test_parser_does_not_import_torch() -> None:
    code = (
        "import sys; import flagscale.config.load; "
        "import flagscale.config.arguments.spec.command_line as p; "
        "p.parse_arguments([]); "
        "print([m for m in ('torch', 'numpy', 'hydra', 'rich') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "kind", "origin"),
    [
        ("tensor_model_parallel_size", "int", "megatron.core ModelParallelConfig"),
        ("num_layers", "int", "megatron.core TransformerConfig"),
        ("adam_beta2", "float", "megatron.core OptimizerConfig"),
        ("overlap_grad_reduce", "bool", "megatron.core DistributedDataParallelConfig"),
        ("mmap_bin_files", "bool", "megatron.core BlendedMegatronDatasetConfig"),
        ("q_lora_rank", "int", "flagscale Latent"),
        ("train_samples", "int", "flagscale TrainingLength"),
        ("transformer_impl", "str", "flagscale Runtime"),
        ("norm_epsilon", "float", "alias of layernorm_epsilon"),
    ],
)
def test_argument_kind_and_origin(name: str, kind: str, origin: str) -> None:
    assert (registry()[name].kind, registry()[name].origin) == (kind, origin)


def test_every_argument_is_documented() -> None:
    assert [a.name for a in registry().values() if not a.doc] == []


def test_defaults_are_within_limits() -> None:
    from flagscale.config.arguments.spec.values import convert

    for argument in arguments().values():
        if argument.default is not None:
            convert(argument, argument.default)


def test_aliases_refer_to_existing_arguments() -> None:
    assert [a.name for a in aliases().values() if a.target and a.target not in arguments()] == []


def test_tables_have_no_stale_names() -> None:
    assert [name for name in BOUNDS if name not in arguments()] == []
    names = [a.name for a in ALIASES]
    assert len(names) == len(set(names))


def test_lookup_of_negated_switch() -> None:
    match = lookup("no_rotary_interleaved")
    assert match is not None and match[1] is not None
    assert (match[1].target, match[1].rule) == ("rotary_interleaved", "opposite")
    assert lookup("no_such_thing") is None
    assert lookup("no_num_layers") is None


def test_closest_names_of_misspelled_argument() -> None:
    assert closest_names("--num-layres")[0] == "num_layers"
    assert closest_names("zzzzzz") == []
    assert why_unsupported("params_dtype") and not why_unsupported("num_layers")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param("lr", "lr", id="argument"),
        pytest.param("nothing_such", None, id="unknown"),
        pytest.param("no_swiglu", None, id="opposite"),
    ],
)
def test_canonical_name(name: str, expected: str | None) -> None:
    assert canonical_name(name) == expected


def test_canonical_names_of_aliases_keep_the_value() -> None:
    for alias in aliases().values():
        assert canonical_name(alias.name) == (alias.target if alias.rule == "same" else None)
