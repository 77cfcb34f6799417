"""Test of the commands on the fine-tuning page, as they are printed there, from a model to an
answer.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.launch_lab import PROJECT

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.torch]

NEEDED = ("run.py", "examples", "flagscale", "third_party")


ANSWER = "A banana is yellow."
SECTIONS = ("Smallest example", "Train on preferences")
"""Sections of the page whose first block has commands."""


def read_commands() -> list[str]:
    """Return the commands of the page, in order."""
    page = (PROJECT / "docs" / "guides" / "fine-tune.md").read_text(encoding="utf-8")
    blocks = []
    for section in SECTIONS:
        text = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
        blocks += re.findall(r"```bash\n(.*?)```", text, re.DOTALL)[:1]
    return "".join(blocks).splitlines()


def test_the_page_leads_from_a_model_to_an_answer(tmp_path: Path) -> None:
    for name in NEEDED:
        (tmp_path / name).symlink_to(PROJECT / name)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    outputs = []
    for command in read_commands():
        result = subprocess.run(
            ["bash", "-c", command],
            env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        outputs.append(result.stdout)
    _, trained, reply, preferred = outputs
    assert "0.07 M of them trained" in trained
    filled = re.search(r"train: 2,000 conversations in [\d,]+ sequences of 256, ([\d.]+)%", trained)
    assert filled is not None
    assert float(filled[1]) > 95
    perplexities = [
        float(number) for number in re.findall(r"valid loss .* perplexity (\S+)", trained)
    ]
    assert len(perplexities) == 2
    assert perplexities[1] < perplexities[0]
    assert reply.strip() == ANSWER
    assert f"step 100 | What colour is a banana? → {ANSWER}" in trained
    (adapters,) = (tmp_path / "outputs_qwen3_tiny" / "adapters").iterdir()
    assert sorted(item.name for item in adapters.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert "the reference model scored 400 pairs of pairs_train.jsonl" in preferred
    margins = [float(number) for number in re.findall(r"valid loss .* margin (\S+)", preferred)]
    assert len(margins) == 2
    assert margins[1] > margins[0] > 0
    assert f"step 40 | What colour is a banana? → {ANSWER}" in preferred
