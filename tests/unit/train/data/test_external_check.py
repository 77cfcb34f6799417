"""Preflight check of the function that ``external_data`` names, without running user code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flagscale.train.data.check import check_function

MODULE = """
from elsewhere import borrowed, other as renamed
import operator
raise SystemExit("it was run")
def batches(args, tokenizer, split, samples):
    inner = 1
class Made: ...
if operator:
    sometimes = lambda *_: None
for each, (pair, _) in ():
    pass
"""


@pytest.fixture
def user_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a file, a package and a namespace package, some of which can be imported."""
    monkeypatch.chdir(tmp_path)
    for file_name in ("own.py", "pack/deep/web.py", "spread/part.py"):
        (tmp_path / file_name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file_name).write_text(MODULE)
    for file_name in ("pack", "pack/deep"):
        (tmp_path / file_name / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "wild.py").write_text("from pack import *\n")
    (tmp_path / "lazy.py").write_text("def __getattr__(name): ...\n")
    (tmp_path / "broken.py").write_text("x = 1\ndef batches(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    "function_path",
    [
        *("own.py:batches", "own:batches", "own:Made", "own:borrowed", "own:renamed"),
        *("own:sometimes", "own:each", "own:pair", "pack.deep.web:batches", "spread.part:batches"),
        *("wild:anything", "lazy:anything", "math:sqrt", "os.path:join"),
    ],
)
@pytest.mark.usefixtures("user_modules")
def test_existing_functions_pass(function_path: str) -> None:
    assert set(check_function(function_path)) == {"found"}


@pytest.mark.parametrize(
    ("function_path", "problem", "hint"),
    [
        pytest.param("none.py:batches", "no file none.py", "copy it there", id="file"),
        pytest.param("nones:batches", "there is no module nones", "PYTHONPATH", id="module"),
        pytest.param("pack.none.web:a", "there is no module pack.none.web", "PYTH", id="middle"),
        pytest.param("own.web:a", "there is no module own.web", "PYTHONPATH", id="no-package"),
        pytest.param("own:batch", "own has no function batch", "mean batches?", id="function"),
        pytest.param("own:inner", "own has no function inner", "name another", id="a-local-name"),
        pytest.param("own.py:zzz", "own.py has no function zzz", "name another", id="in-file"),
        pytest.param("broken.py:batches", "broken.py:2: ", "mend it", id="syntax"),
    ],
)
@pytest.mark.usefixtures("user_modules")
def test_missing_functions_are_reported(function_path: str, problem: str, hint: str) -> None:
    result = check_function(function_path)
    assert result["problem"].startswith(problem)
    assert hint in result["hint"]


def test_result_is_one_json_line_without_torch(user_modules: Path) -> None:
    code = (
        "import sys; from flagscale.train.data.check import main; "
        "code = main(['own.py:batches']); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=user_modules, check=True
    )
    assert json.loads(process.stdout) == {"found": "own.py"}
