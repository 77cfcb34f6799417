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


def read_command_blocks() -> tuple[list[str], str]:
    """Return the page's commands, and the output that they print at the end."""
    page = (PROJECT / "docs" / "finetuning.md").read_text(encoding="utf-8")
    walk = page.partition("## From start to end")[2].partition("\n## ")[0]
    commands, expected_answer = re.findall(r"```\n(.*?)```", walk, re.DOTALL)
    return commands.splitlines(), expected_answer.strip()


def test_the_page_leads_from_a_model_to_an_answer(tmp_path: Path) -> None:
    for name in NEEDED:
        (tmp_path / name).symlink_to(PROJECT / name)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    commands, expected_answer = read_command_blocks()
    outputs = []
    for command in commands:
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
    trained, reply = outputs[1:]
    assert "0.07 M of them trained" in trained
    filled = re.search(r"train: 2,000 conversations in [\d,]+ sequences of 256, ([\d.]+)%", trained)
    assert filled is not None
    assert float(filled[1]) > 95
    perplexities = [
        float(number) for number in re.findall(r"valid loss .* perplexity (\S+)", trained)
    ]
    assert len(perplexities) == 2
    assert perplexities[1] < perplexities[0]
    assert reply.strip() == expected_answer
    assert f"step 100 | What colour is a banana? → {expected_answer}" in trained
    (adapters,) = (tmp_path / "outputs_qwen3_tiny" / "adapters").iterdir()
    assert sorted(item.name for item in adapters.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
