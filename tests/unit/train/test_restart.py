"""Later attempts of a run, after a restart, resume from the run's checkpoints."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from flagscale.status import ATTEMPT_VARIABLE, STATUS_DIR_VARIABLE, StatusWriter

pytestmark = pytest.mark.torch


@pytest.mark.usefixtures("single_process_group")
@pytest.mark.parametrize(
    ("attempt", "has_checkpoint", "loads_own_checkpoint"),
    [
        pytest.param("0", True, False, id="first-attempt"),
        pytest.param("1", False, False, id="nothing-was-saved"),
        pytest.param("1", True, True, id="saved-before"),
    ],
)
def test_later_attempts_load_their_own_checkpoint(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    attempt: str,
    has_checkpoint: bool,
    loads_own_checkpoint: bool,
) -> None:
    from flagscale.train.restart import resume_from_own_checkpoint

    first_attempt_status = StatusWriter(tmp_path / "status", 0)
    if has_checkpoint:
        first_attempt_status.write("checkpoint", step=10, path="x", seconds=1.0)
    monkeypatch.setenv(STATUS_DIR_VARIABLE, str(tmp_path / "status.1"))
    monkeypatch.setenv(ATTEMPT_VARIABLE, attempt)
    args = argparse.Namespace(
        save="/own", load="/base", finetune=True, no_load_optim=True, no_load_rng=True
    )
    args.no_save_optim = False
    resume_from_own_checkpoint(args)
    expected = (
        ("/own", False, False, False) if loads_own_checkpoint else ("/base", True, True, True)
    )
    assert (args.load, args.finetune, args.no_load_optim, args.no_load_rng) == expected
