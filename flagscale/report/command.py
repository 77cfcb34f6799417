"""``flagscale report``: write the HTML page of runs."""

from __future__ import annotations

import gc
import hashlib
import os
import sys
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flagscale.errors import ConfigError
from flagscale.files import strict_json
from flagscale.launcher.state import RunState
from flagscale.launcher.sweep_runs import StoredSweep
from flagscale.output_streams import escape_controls
from flagscale.report.pages import write_reports
from flagscale.report.record import Difference, find_differences
from flagscale.report.run import RunReport
from flagscale.report.story import collect_story
from flagscale.report.sweep_page import write_sweep_page
from flagscale.report.tuning_page import write_tuning_page

_MAX_NAMED_SUBJECTS = 3
_MAX_NAME_CHARACTERS = 200
_MAX_DIFFERENCES = 20


@dataclass(frozen=True)
class Subject:
    """Subject of a report: one run, or the runs of one directory, oldest first."""

    states: Sequence[RunState]
    is_directory: bool = False

    @property
    def file_name(self) -> str:
        """Name that differs from those of all other subjects, and stays when a directory gets more
        runs.
        """
        first = self.states[0]
        return f"{first.exp_dir.name}_{first.run_id}" if self.is_directory else first.run_id

    def __str__(self) -> str:
        count = len(self.states)
        return f"run {self.states[0].run_id}" if count == 1 else f"{count} runs of one directory"


def default_path(names: Sequence[str]) -> Path:
    """Return the default path of a report about subjects with these names."""
    text = "_".join(names)
    if len(names) > _MAX_NAMED_SUBJECTS or len(text) > _MAX_NAME_CHARACTERS:
        digest = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:8]
        text = f"{names[0][:_MAX_NAME_CHARACTERS]}_and_{len(names) - 1}_more_{digest}"
    return Path(f"report_{text}.html")


def write_report(subjects: Sequence[Subject], output: Path | None, *, show: bool = False) -> int:
    """Write the page of these subjects and print its path.

    The default is a file in the current directory whose name has the ids of all subjects.
    ``show`` opens it in the user's browser.

    Raises:
        ConfigError: the file cannot be written.
    """
    path = output or default_path([subject.file_name for subject in subjects])
    title = str(subjects[0])
    if len(subjects) > 1:
        has_stories = any(len(subject.states) > 1 for subject in subjects)
        title = f"{len(subjects)} {'experiments' if has_stories else 'runs'}"

    stories = [collect_story(subject.states) for subject in subjects]
    code = _write_page(lambda: write_reports(stories, path), path, title, show=show)
    if len(stories) > 1:
        print("\n".join(_difference_lines(stories)), flush=True)
    return code


def print_records(subjects: Sequence[Subject]) -> int:
    """Print the records of these subjects and their differences as JSON."""
    stories = [collect_story(subject.states) for subject in subjects]
    print(strict_json(_to_json(stories), indent=2))
    return 0


def _to_json(stories: Sequence[RunReport]) -> dict[str, object]:
    return {
        "runs": [
            {
                "run_id": story.state.run_id,
                "name": story.state.name,
                "directory": str(story.state.exp_dir),
                "started": story.state.started,
                "state": story.snapshot.phase.value,
                "rerun_of": story.launch.rerun_of if story.launch is not None else "",
                **story.record.sections,
                "changed_files": list(story.record.files),
            }
            for story in stories
        ],
        "differences": {row.key: list(row.values) for row in _list_differences(stories)},
    }


def _list_differences(stories: Sequence[RunReport]) -> list[Difference]:
    """Return the entries of configuration and record that differ, as far as all have one."""
    differences = []
    for texts in (
        [story.settings.options for story in stories],
        [story.record.values for story in stories],
    ):
        differences += find_differences(texts) if all(texts) else []
    return differences


def _difference_lines(stories: Sequence[RunReport]) -> Iterator[str]:
    for story in stories:
        if not story.record.values:
            yield f"note: run {story.state.run_id} has no record of its code and software"
    differences = _list_differences(stories)
    if not differences:
        yield "nothing that was recorded of all differs"
        return
    yield "these differ:"
    yield from (escape_controls(f"  {row}") for row in differences[:_MAX_DIFFERENCES])
    if len(differences) > _MAX_DIFFERENCES:
        yield f"  and {len(differences) - _MAX_DIFFERENCES} more, on the page"


def write_sweep_report(sweep: StoredSweep, output: Path | None, *, show: bool = False) -> int:
    """Write the page of a sweep and print its path; the other arguments are as for
    :func:`write_report`.

    Raises:
        ConfigError: the file cannot be written.
    """
    digest = hashlib.sha256(os.fsencode(sweep.directory)).hexdigest()[:8]
    path = output or default_path([f"sweep_{sweep.name}_{digest}"])
    title = f"a sweep of {len(sweep.runs)} runs"
    return _write_page(lambda: write_sweep_page(sweep, path), path, title, show=show)


def write_tuning_report(answer: Path, output: Path | None, *, show: bool = False) -> int:
    """Write the page of a search for a layout and print its path; the other arguments are as for
    :func:`write_report`.

    Raises:
        ConfigError: the file cannot be written.
    """
    exp_dir = answer.parent.parent
    digest = hashlib.sha256(os.fsencode(exp_dir)).hexdigest()[:8]
    path = output or default_path([f"layouts_{exp_dir.name}_{digest}"])
    return _write_page(
        lambda: write_tuning_page(answer, path), path, f"the layouts in {exp_dir}", show=show
    )


def _write_page(write: Callable[[], object], path: Path, title: str, *, show: bool) -> int:
    # The events of a long run live until the page is written, so nothing is garbage.
    gc.disable()
    try:
        write()
    except OSError as error:
        raise ConfigError(
            f"{path}: the report cannot be written: {error.strerror}",
            hint="--output FILE names another path",
        ) from error
    finally:
        gc.enable()
    print(f"report of {title}: {path} ({path.stat().st_size / 1e6:.1f} MB)", flush=True)
    if show and not webbrowser.open(path.absolute().as_uri()):
        print("note: no browser was found to show it in", file=sys.stderr)
    return 0
