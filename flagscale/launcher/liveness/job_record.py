"""Records of a run's job (``liveness.json``), which its coordinators write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flagscale.files import read_json
from flagscale.launcher.layout import HOST_LABEL_PREFIX, LIVENESS_FILE


def read_newest_job_record(run_dir: Path) -> dict[str, Any]:
    """Return the newest record of the job, or {}.

    Each coordinator writes to the directory of its host, so that one that is cut off disturbs no
    other. A successor's record has a higher ``term``. Only a job that hosts may leave has one: its
    records have ``places``.

    Args:
        run_dir: Directory of the run on any host. Those of the other hosts are next to it.
    """
    record = read_json(run_dir / LIVENESS_FILE)
    if record is not None and "places" not in record:
        return record
    paths = run_dir.parent.parent.glob(f"{HOST_LABEL_PREFIX}*/{run_dir.name}/{LIVENESS_FILE}")
    records = [record, *map(read_json, paths)]
    return max(filter(None, records), key=_read_term, default={})


def _read_term(record: dict[str, Any]) -> int:
    term = record.get("term", 0)
    return term if type(term) is int else 0
