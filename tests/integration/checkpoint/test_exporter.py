"""Exports of checkpoints that fail or are ended. `test_train_gpt.py` has those that succeed."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path

import pytest
from support.held_exports import hold_exports

from flagscale.train.checkpoint.store import CheckpointStore

pytestmark = [pytest.mark.integration, pytest.mark.torch]


def test_failed_and_ended_exports_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flagscale.train.checkpoint.exporter import CheckpointExporter

    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=os.pathsep)
    go_on = tmp_path / "go on"
    hold_exports(tmp_path / "site", go_on)
    save, export = tmp_path / "checkpoints", tmp_path / "hf"
    (export / ".iter_0000003.partial").mkdir(parents=True)
    (export / "iter_0000005").mkdir()
    exporter = CheckpointExporter(
        Namespace(
            save=str(save),
            export_huggingface=str(export),
            export_peft=None,
            pretrained_checkpoint=None,
            tokenizer_path=None,
        )
    )
    exporter.start(5)
    # Neither an export of an earlier checkpoint of this iteration nor half of one remains.
    assert list(export.iterdir()) == []
    assert exporter.source == CheckpointStore(save).path(5)
    exporter.start(6)
    (message,) = exporter.pop_messages()
    assert message == (
        "the checkpoint of iteration 6 is not exported now, because the export of iteration 5 is "
        "still under way. The last checkpoint of a completed run is exported at its end; "
        f"`flagscale convert {save / 'iter_0000006'} DIR` exports any"
    )
    go_on.touch()
    exporter.close(finish=True)
    (message,) = exporter.pop_messages()
    assert message.startswith("the export of iteration 5 failed: ")
    assert str(save / "iter_0000005") in message
    assert exporter.source is None
    exporter.start(7)
    exporter.close(finish=False)
    (message,) = exporter.pop_messages()
    assert message == (
        f"the export of iteration 7 was ended; `flagscale convert {save / 'iter_0000007'} DIR` "
        "does it"
    )
