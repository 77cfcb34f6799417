"""Test of the runs of a directory that continue each other, and of one that is started again."""

from __future__ import annotations

import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from support.launch_lab import Lab
from support.training_lab import PROGRAM as PROGRAM_FILE
from support.training_lab import read_losses, train_sections

from flagscale.cli import main
from flagscale.config.schema import PROJECT
from flagscale.launcher import runs
from flagscale.launcher.launch_record import read_launch_record
from flagscale.launcher.layout import Layout
from flagscale.launcher.state import load_state
from flagscale.report.story import collect_story

pytestmark = pytest.mark.integration

# Continues after the last step that an earlier run has left in its directory, and does not end
# before its host is recorded.
PROGRAM = """\
import os, sys, time
from pathlib import Path
from flagscale.status import StatusWriter
done, steps = Path(sys.argv[1], "done"), int(sys.argv[2])
status = StatusWriter.from_environment(0)
for event in ("started", "joined", "ready"):
    status.write(event)
for step in range(int(done.read_text()) + 1 if done.exists() else 1, steps + 1):
    status.write("progress", step=step, train_steps=steps, loss=9.0 - step)
done.write_text(str(steps))
record, end = Path(os.environ["FLAGSCALE_STATUS_DIR"], "host.jsonl"), time.monotonic() + 60
while time.monotonic() < end and not (record.exists() and b"\\n" in record.read_bytes()):
    time.sleep(0.02)
"""


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Restore the handlers that a run in the foreground replaces."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


def test_a_continued_run_is_one_story_and_can_be_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "steps.py").write_text(PROGRAM)
    experiment = {
        "exp_name": "steps",
        "exp_dir": "out",
        "task": {"type": "command", "command": "steps.py ${experiment.exp_dir} ${steps}"},
        "runner": {"nproc_per_node": 1, "preflight": False, "foreground": True},
    }
    (tmp_path / "conf").mkdir()
    yaml_file = tmp_path / "conf" / "lab.yaml"
    yaml_file.write_text(yaml.safe_dump({"experiment": experiment, "steps": 3}))
    monkeypatch.chdir(tmp_path)
    for words in (["test", "conf/lab.yaml"], ["test", "conf/lab.yaml", "steps=5"]):
        assert _flagscale(*words) == 0
    story = collect_story(runs.find_history(tmp_path / "out"))
    assert [list(attempt.steps) for attempt in story.attempts] == [[1, 2, 3], [4, 5]]
    (change,) = (event for event in story.timeline if event.kind == "change")
    assert change.text.partition("; ")[2].startswith(
        "changed: experiment.task.command steps.py out 3 → steps.py out 5, steps 3 → 5"
    )
    record = story.record.sections
    assert record["software"]["python"] == platform.python_version()
    assert record["packages"]["numpy"] == version("numpy")
    yaml_file.write_text("changed since")
    first_id = story.runs[0].state.run_id
    assert _flagscale("rerun", first_id, "steps=2") == 0
    layout = Layout(tmp_path / "out_rerun_1")
    again = load_state(layout.state)
    assert again is not None
    assert (layout.exp_dir / "done").read_text() == "2", "the first run had three steps"
    record = read_launch_record(layout, again.run_id)
    assert record is not None
    assert (record.rerun_of, record.directory) == (first_id, str(tmp_path))


def _flagscale(*words: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(words)
    return end.value.code if isinstance(end.value.code, int) else 0


def test_a_rerun_runs_the_code_of_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program, its modules and this project are those of the first start."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    code = tmp_path / "code"
    code.mkdir()
    (code / "show.py").write_text(
        "import flagscale, words\nprint(words.TEXT, flagscale.__file__)\n"
    )
    (code / "words.py").write_text("TEXT = 'then'\n")
    monkeypatch.chdir(code)
    words = ["--exp-dir", str(tmp_path / "out"), "--snapshot", "--", "python", "show.py"]
    assert _flagscale("test", *words) == 0
    (code / "words.py").write_text("TEXT = 'now'\n")
    (run,) = runs.find_history(tmp_path / "out")
    program = "import sys; from flagscale.cli import main; main(sys.argv[1:])"
    arguments = [sys.executable, "-c", program, "rerun", run.run_id, "runner.foreground=true"]
    outputs = []
    for more in ([], ["runner.snapshot=False"]):
        result = subprocess.run([*arguments, *more], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        outputs.append(result.stdout)
    copies = (tmp_path / "out_rerun_1" / "logs" / "code").glob("flagscale-*")
    assert f"then {next(copies)}/flagscale/__init__.py" in outputs[0]
    assert f"  code:      the copy of then, {tmp_path}/out/logs/code/flagscale-" in outputs[0]
    assert "note: its copy of the code is not used" in outputs[1]
    assert f"now {PROJECT}/flagscale/__init__.py" in outputs[1]


@pytest.mark.slow
@pytest.mark.torch
def test_a_rerun_from_the_copy_has_the_same_losses(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(lab.root / "state"))
    runner = {"nproc_per_node": 2, "snapshot": True}
    lab.configure(
        "", task={"entrypoint": str(PROGRAM_FILE)}, runner=runner, train=train_sections(10)
    )
    result = lab.run_action("test", timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    program = "import sys; from flagscale.cli import main; main(sys.argv[1:])"
    words = ["rerun", str(lab.exp_dir), "runner.foreground=true"]
    result = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=lab.root,
        env=lab.environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    again = Lab(lab.root, lab.exp_dir.with_name(f"{lab.exp_dir.name}_rerun_1"))
    assert again.state().hosts[0].script.read_text().count(f"{again.exp_dir}/logs/code/") > 3
    losses = read_losses(lab)
    assert [step for step, *_ in losses] == [*range(1, 11)]
    assert read_losses(again) == losses
