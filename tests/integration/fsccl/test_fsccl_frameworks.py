"""Tests of fsccl under other frameworks, with the code of the guide."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.needs import skip_or_fail

pytestmark = [
    pytest.mark.slow,
    pytest.mark.integration,
    pytest.mark.torch,
    pytest.mark.compiler,
]

ROOT = Path(__file__).parents[3]
GUIDE = ROOT / "docs" / "guides" / "fsccl-in-other-frameworks.md"
WORKER = Path(__file__).with_name("framework_worker.py")
RANKS = 2
MODEL_BYTES = 4 * (8 * 8 + 8 + 8 + 1)
"""Size of the smallest model's gradients (framework_worker.py)."""


def read_guide_code(heading: str, index: int = 0) -> str:
    """Return a code block of the guide's section ``heading``."""
    sections = re.split(r"^## ", GUIDE.read_text(encoding="utf-8"), flags=re.M)
    (section,) = (text for text in sections if text.startswith(heading + "\n"))
    return re.findall(r"^```python\n(.*?)^```", section, re.M | re.S)[index]


def train(framework: str, code: str, directory: Path) -> list[dict[str, Any]]:
    """Train with ``framework`` on two ranks, each its own node; return the ranks' results."""
    directory.mkdir()
    code_file = directory / "code.py"
    code_file.write_text(code, encoding="utf-8")
    process = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(RANKS), str(WORKER)),
            *(framework, str(code_file), str(directory)),
        ],
        cwd=directory,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "FSCCL_CLUSTERS": ",".join(["1"] * RANKS),
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize(
    ("framework", "package", "heading", "index"),
    [
        ("accelerate", "accelerate", "accelerate", 0),
        ("transformers", "transformers", "transformers.Trainer", 0),
        ("lightning", "lightning", "Lightning", 0),
        pytest.param("fabric", "lightning", "Lightning Fabric", 0, id="fabric-ddp"),
        pytest.param("fabric", "lightning", "Lightning Fabric", 1, id="fabric-fsdp2"),
        ("deepspeed-zero1", "deepspeed", "DeepSpeed", 0),
        ("deepspeed-zero2", "deepspeed", "DeepSpeed", 0),
        ("deepspeed-zero3", "deepspeed", "DeepSpeed", 0),
    ],
)
def test_training_equals_that_with_gloo(
    framework: str, package: str, heading: str, index: int, built_extension: None, tmp_path: Path
) -> None:
    if find_spec(package) is None:
        skip_or_fail("frameworks", f"no {package} in this environment (make test-slow installs it)")
    code = read_guide_code(heading, index)
    assert '"fsccl"' in code
    results = train(framework, code, tmp_path / "fsccl")
    references = train(framework, code.replace('"fsccl"', '"gloo"'), tmp_path / "gloo")
    for result, reference in zip(results, references, strict=True):
        assert result["backends"] == ["fsccl"]
        assert reference["backends"] == ["gloo"]
        assert result["loss"] == reference["loss"]
        assert result["sent_bytes"] > MODEL_BYTES
