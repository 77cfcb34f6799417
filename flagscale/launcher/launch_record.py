"""Record of a start: when, from where and with which code a run was started.

It is ``launch.json`` in the run's own directory (:class:`flagscale.launcher.layout.RunFiles`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flagscale import __version__
from flagscale.config.schema import Experiment
from flagscale.files import format_json, read_json, to_plain
from flagscale.launcher.code_version import CodeVersion
from flagscale.launcher.layout import Layout
from flagscale.records import from_record


@dataclass(frozen=True)
class RecordedSnapshot:
    """Copies of code that a run was started with (:mod:`.code_snapshot`).

    ``project`` is the copy of this project. ``copy`` is that of the directory ``origin``, which has
    a ``program`` of the user; the three are empty for a program of this project.
    """

    project: str
    origin: str = ""
    copy: str = ""
    program: str = ""


@dataclass(frozen=True)
class LaunchRecord:
    """Record of a start.

    ``directory`` is the launcher's working directory, to which relative paths refer.
    ``config_file`` is the YAML that was named. ``rerun_of`` is the id of the run whose recorded
    configuration was started again, or empty. ``host`` is the name of the launching machine.
    """

    launched: float
    version: str
    directory: str
    config_file: str
    code: tuple[CodeVersion, ...]
    rerun_of: str
    host: str = ""
    snapshot: RecordedSnapshot | None = None

    def format(self) -> str:
        """Return the record as the text of its file."""
        return format_json(to_plain(self))


@dataclass(frozen=True)
class Rerun:
    """Run that is started again; none by default.

    ``record`` is its record if its copies of the code are used again, and ``changes`` are the
    recorded changes of that code.
    """

    run_id: str = ""
    record: LaunchRecord | None = None
    changes: str = ""


def make_launch_record(
    experiment: Experiment,
    code: Sequence[CodeVersion],
    rerun_of: str = "",
    snapshot: RecordedSnapshot | None = None,
) -> LaunchRecord:
    """Return the record of a start of an experiment at this moment, with this code."""
    return LaunchRecord(
        launched=round(time.time(), 3),
        version=__version__,
        directory=os.getcwd(),  # noqa: PTH109 - the text is recorded
        config_file=str(experiment.config_file),
        code=tuple(code),
        rerun_of=rerun_of,
        host=os.uname().nodename,
        snapshot=snapshot,
    )


def read_launch_record(layout: Layout, run_id: str) -> LaunchRecord | None:
    """Return the record of a run; None if there is none, as for runs of older versions."""
    record = read_json(layout.run_files(run_id).launch)
    return from_record(LaunchRecord, None if record is None else _with_defaults(record))


def _with_defaults(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record with the fields that an older version did not write."""
    code = record.get("code")
    if isinstance(code, list):
        missing: dict[str, Any] = {"files": [], "file_count": 0}
        code = [{**missing, **item} if isinstance(item, dict) else item for item in code]
    return {"host": "", "snapshot": None, **record, "code": code}
