"""HTML page of one run, or of several side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from errno import EISDIR
from os import strerror
from pathlib import Path

from flagscale.config.secrets import hide_passwords
from flagscale.files import write_atomic
from flagscale.hosts.names import compress_names, format_ranges
from flagscale.launcher.layout import RANKS_DIRECTORY, Layout
from flagscale.launcher.liveness.diagnosis import Failure
from flagscale.launcher.snapshot import Phase
from flagscale.launcher.state import RunState
from flagscale.report import curves
from flagscale.report.frame import render_page
from flagscale.report.html import (
    Cell,
    Html,
    definition_list,
    details,
    element,
    join_parts,
    section,
    table,
)
from flagscale.report.plot import MARKS, SIGNS, render_plot
from flagscale.report.record_part import render_records
from flagscale.report.run import RunReport, collect_run, find_backend, list_devices, make_labels
from flagscale.report.run_table import (
    describe_code,
    format_duration,
    format_end,
    format_time,
    list_earlier_configurations,
    render_run_table,
)
from flagscale.report.spikes import GRAD_NORM_RULE, LOSS_RULE
from flagscale.report.step_times import render_step_times
from flagscale.report.timeline import TimelineEvent

_MAX_HOSTS = 256
_MAX_EVENTS = 400
_MAX_CHARACTERS = 20_000
_PHASE_CLASSES = {
    **dict.fromkeys((Phase.COMPLETED, Phase.RUNNING), "good"),
    **dict.fromkeys((Phase.FAILED, Phase.LOST, Phase.UNREACHABLE), "bad"),
}
_FREQUENT_KINDS = ("checkpoint", "evaluation", "tasks")


def write_page(states: Sequence[RunState], output: Path) -> Path:
    """Write the page of these runs in their current state to a private file, and return its path.

    Raises:
        OSError: it cannot be written.
    """
    return write_reports([collect_run(state) for state in states], output)


def write_reports(run_reports: Sequence[RunReport], output: Path) -> Path:
    """Write the page of these reports to a private file, and return its path.

    Raises:
        OSError: it cannot be written.
    """
    return write_text(render_runs(run_reports), output)


def write_text(text: str, output: Path) -> Path:
    """Write a page to a private file, or to a pipe or device, and return its path.

    Raises:
        OSError: it cannot be written.
    """
    if output.is_dir():
        raise IsADirectoryError(EISDIR, strerror(EISDIR), str(output))
    if output.exists() and not output.is_file():
        output.write_text(text, encoding="utf-8")  # a pipe, or a device
    else:
        write_atomic(output.resolve(), text, durable=False)
    return output


def render_runs(
    run_reports: Sequence[RunReport],
    *,
    title: str = "",
    overview: Html | None = None,
    shown_configuration: RunReport | None = None,
) -> str:
    """Return the page of one or more runs. Text from outside is escaped.

    Args:
        run_reports: Runs, or directories of runs.
        title: Title; by default the names of the runs.
        overview: Replaces the description of each run, its hosts and its files, as for a sweep.
        shown_configuration: The only run whose configuration is shown; by default each run's.
    """
    names = make_labels(run_reports)
    collection_time = format_time(max(run.collected_at for run in run_reports))
    live_names = [
        n for n, run in zip(names, run_reports, strict=True) if not run.snapshot.phase.ended
    ]
    live_runs_note = f": {', '.join(live_names)} may have gone on since" if live_names else ""
    cards = (_run_card(run, names[index], index) for index, run in enumerate(run_reports))
    configured_runs = run_reports if shown_configuration is None else [shown_configuration]
    configured_names = [names[run_reports.index(run)] for run in configured_runs]
    parts = [
        element("div", join_parts(cards), class_="cards") if overview is None else overview,
        _section_per_run(run_reports, names, "Runs of the directory", render_run_table),
        _section_per_run(run_reports, names, "What failed", _failures_part),
        _curves_section(run_reports),
        section("What happened", _events_part(run_reports, names)),
        _section_per_run(run_reports, names, "Hosts and layout", _hosts_part)
        if overview is None
        else "",
        _section_per_run(run_reports, names, "Time of a step", render_step_times)
        if overview is None
        else "",
        render_records(configured_runs, configured_names),
        _configuration_section(configured_runs, configured_names),
        _section_per_run(run_reports, names, "Files", _files) if overview is None else "",
    ]
    return render_page(
        title or " and ".join(names),
        *parts,
        note=f"As of {collection_time}{live_runs_note}.",
    )


def _section_per_run(
    run_reports: Sequence[RunReport],
    names: Sequence[str],
    title: str,
    render_part: Callable[[RunReport], Html],
) -> Html:
    """Return a section with the part of every run for which ``render_part`` returns any HTML."""
    parts = [
        (name, html)
        for run, name in zip(run_reports, names, strict=True)
        if (html := render_part(run))
    ]
    if not parts:
        return Html()
    titled_parts = (
        (element("h3", name) if len(run_reports) > 1 else "", html_part)
        for name, html_part in parts
    )
    return section(title, *(piece for pair in titled_parts for piece in pair))


# -- at the top --------------------------------------------------------------------------------


def _run_card(run: RunReport, name: str, index: int) -> Html:
    state, snapshot = run.state, run.snapshot
    kind = _PHASE_CLASSES.get(snapshot.phase, "warn")
    pill = element("span", snapshot.phase.value, class_=f"state {kind}")
    attempts = 1 if run.runs else max(len(run.attempts), snapshot.attempt)
    hosts = compress_names(host.name for host in state.hosts)
    size_text = f"{state.world_size} {_rank_word(state.world_size)} on {len(state.hosts)} "
    return element(
        "article",
        element("h2", name, " ", pill),
        definition_list(
            {
                "run": _describe_run_id(run),
                "model": run.settings.model,
                "program": "" if run.settings.model else run.settings.program,
                "layout": run.settings.layout,
                "batch": run.settings.batch,
                "hosts": f"{size_text}{'host' if len(state.hosts) == 1 else 'hosts'}: {hosts}",
                "devices": ", ".join(dict.fromkeys(filter(None, list_devices(run).values()))),
                "backend": find_backend(run),
                "step": _format_progress(run),
                "started": format_time(state.started) if state.started else "",
                "ended" if run.end_time else "lasted so far": format_end(run),
                "attempts": f"{attempts} of {max(snapshot.attempts, attempts)}" * (attempts > 1),
                "exit code": "" if snapshot.exit_code is None else str(snapshot.exit_code),
                "runner": state.runner.type,
                "YAML": run.config,
                "rerun of": run.launch.rerun_of if run.launch is not None else "",
                "code": describe_code(run),
                "directory": str(state.exp_dir),
                "not reached": run.query_error,
            }
        ),
        class_=f"card c{curves.run_colour(index)}",
    )


def _describe_run_id(run: RunReport) -> str:
    if not run.runs:
        return run.state.run_id
    return f"{run.state.run_id}, the last of {len(run.runs)} in this directory"


def _rank_word(count: int) -> str:
    return "rank" if count == 1 else "ranks"


def _format_progress(run: RunReport) -> str:
    """Format the progress, such as ``150 of 200``, and the remaining time."""
    last_step = max((s for a in run.attempts[-1:] for s in a.steps[-1:]), default=run.snapshot.step)
    if last_step is None:
        return ""
    total_steps = next((a.train_steps for a in reversed(run.attempts) if a.train_steps), None)
    seconds_left = run.snapshot.eta_seconds
    remaining = f", {format_duration(seconds_left)} left at this pace" if seconds_left else ""
    return f"{last_step:,}" + (f" of {total_steps:,}" if total_steps else "") + remaining


# -- failures and events -----------------------------------------------------------------------


def _failures_part(run: RunReport) -> Html:
    """Return the failures of a run; for a directory first those of its last run."""
    earlier_parts = (
        (number, _failures_of_run(earlier_run))
        for number, earlier_run in enumerate(run.runs[:-1], start=1)
    )
    return join_parts(
        (
            _failures_of_run(run),
            *(details(f"run {number}", part) for number, part in earlier_parts if part),
        )
    )


def _failures_of_run(run: RunReport) -> Html:
    snapshot = run.snapshot
    parts = []
    if snapshot.failure is not None:
        parts.append(element("p", element("strong", "The first failure"), class_="bad"))
        parts.append(_failure_part(snapshot.failure))
    parts += [
        details(f"attempt {number}: {hide_passwords(failure.headline())}", _failure_part(failure))
        for number, failure in snapshot.earlier
    ]
    if not parts:
        parts = [
            element("p", f"attempt {n}: {hide_passwords(t)}") for n, t in run.registered_failures
        ]
    if snapshot.warnings:
        lines = (element("li", hide_passwords(line)) for line in snapshot.warnings[:50])
        parts.append(details(f"{len(snapshot.warnings)} warnings", element("ul", *lines)))
    return join_parts(parts)


def _failure_part(failure: Failure) -> Html:
    rank = "" if failure.rank is None else f"rank {failure.rank}"
    code = "" if failure.exit_code is None else str(failure.exit_code)
    fields = {"host": failure.host, "rank": rank, "exit code": code, "log": str(failure.log)}
    trace = element("pre", _limit_text(failure.traceback)) if failure.traceback else ""
    reason = element("pre", _limit_text(failure.reason))
    return join_parts((reason, definition_list(fields), trace))


def _limit_text(text: str) -> str:
    """Return text of ranks without secrets, limited in length."""
    return hide_passwords(text)[-_MAX_CHARACTERS:]


def _events_part(run_reports: Sequence[RunReport], names: Sequence[str]) -> Html:
    events = [
        (name, event)
        for run, name in zip(run_reports, names, strict=True)
        for event in run.timeline
    ]
    events.sort(key=lambda pair: pair[1].time or 0.0)
    # If there are many, keep the last checkpoints and evaluations; all are on the axis.
    frequent = [pair for pair in events if pair[1].kind in _FREQUENT_KINDS]
    rare = [pair for pair in events if pair[1].kind not in _FREQUENT_KINDS][:_MAX_EVENTS]
    displayed_ids = {
        id(listed_event)
        for _, listed_event in (*rare, *frequent[-max(0, _MAX_EVENTS - len(rare)) or 1 :])
    }
    displayed = [pair for pair in events if id(pair[1]) in displayed_ids]
    has_stories = any(run.runs for run in run_reports)
    name_heading = "experiment" if has_stories else "run"
    headings = ["time", name_heading, "run", "attempt", "step", "", "what"]
    is_shown = [
        *(True, len(run_reports) > 1, has_stories),
        *(any(any_event.attempt > 1 for _, any_event in events), True, True, True),
    ]
    columns = [i for i, shown in enumerate(is_shown) if shown]
    rows = [
        [row[i] for i in columns]
        for row in (_event_row(name, row_event) for name, row_event in displayed)
    ]
    headings = [headings[i] for i in columns]
    omitted = len(events) - len(displayed)
    omission_note = element("p", f"{omitted:,} more are left out here.") if omitted else ""
    event_table = table(headings, rows, caption=f"in the order of time ({time.strftime('%z')})")
    return details(
        f"{len(events):,} event{'s' if len(events) != 1 else ''}",
        event_table,
        omission_note,
        is_open=len(rows) <= 30,
    )


def _event_row(name: str, event: TimelineEvent) -> list[object]:
    sign = element(
        "span", SIGNS.get(event.kind, ""), class_=f"sign {event.kind}", aria_hidden="true"
    )
    step = "" if event.step is None else f"{event.step:,}"
    moment = format_time(event.time).rpartition(" ")[0] if event.time else ""
    run_number = str(event.run_number or "")
    return [Cell(moment, "time"), name, run_number, str(event.attempt), step, sign, event.text]


# -- curves ------------------------------------------------------------------------------------


def _curves_section(run_reports: Sequence[RunReport]) -> Html:
    plots = curves.main_plots(run_reports)
    if not plots:
        missing_reason = "no rank has reported a step"
        external = any(run.state.external for run in run_reports)
        missing_reason += (
            ", and a program of another project may report none" if external else " so far"
        )
        return section("Curves", element("p", f"There are no metrics: {missing_reason}."))
    further_plots = [render_plot(plot) for plot in curves.other_plots(run_reports)]
    return section(
        "Curves",
        element("p", join_parts(_mark_legend(), " · "), class_="key"),
        element("div", *map(render_plot, plots), class_="plots"),
        *(
            element("p", element("small", text))
            for text in curves.describe_missing_metrics(run_reports)
        ),
        details("more curves", element("div", *further_plots, class_="plots"))
        if further_plots
        else "",
        details("how to read them", *(element("p", text) for text in _reading_help(run_reports))),
    )


def _mark_legend() -> Iterator[Html]:
    for kind, meaning in MARKS.items():
        sign = element("span", SIGNS[kind], class_=f"sign {kind}", aria_hidden="true")
        yield join_parts((sign, meaning), " ")


def _reading_help(run_reports: Sequence[RunReport]) -> Iterator[str]:
    steps = max((len(a.steps) for run in run_reports for a in run.attempts), default=0)
    yield (
        f"Curves are of the {steps:,} steps that ranks have reported (every log_interval-th). "
        "Where there are more than a plot has room for, consecutive steps are grouped, and the "
        "lowest and the highest value of each group are drawn: no extreme is left out."
    )
    yield (
        f"A spike of the loss is {LOSS_RULE.describe()} (as training warns of, at every step); one "
        f"of the gradient norm is {GRAD_NORM_RULE.describe()}. Of spikes in a row the first is "
        "marked."
    )
    yield (
        "Steps that a later attempt or run repeated are faint. An axis is logarithmic where its "
        "largest value is more than ten times the median. Arrow keys, Home, End and Page keys "
        "move along a plot."
    )


# -- hosts, configuration, files ---------------------------------------------------------------


def _hosts_part(run: RunReport) -> Html:
    devices_by_host, rows_by_host = list_devices(run), {row.host: row for row in run.snapshot.hosts}
    rows = []
    for host in run.state.hosts[:_MAX_HOSTS]:
        row = rows_by_host.get(host.name)
        busy = row.doing if row and not row.phase.ended else ""
        activity = ", ".join(filter(None, (busy, row.trouble, row.waits))) if row else ""
        ranks = format_ranges(host.ranks) if len(host.ranks) else ""
        phase = row.phase.value if row else ""
        role = run.settings.host_roles.get(host.node_rank, "")
        step = "" if row is None or row.step is None else f"{row.step:,}"
        kind = devices_by_host.get(host.node_rank, "")
        rows.append([host.name, str(host.node_rank), ranks, kind, role, phase, step, activity])
    headings = ("host", "node rank", "ranks", "devices", "holds", "state", "step", "doing")
    # Empty columns are left out.
    columns = [i for i in range(len(headings)) if any(row[i] for row in rows)]
    host_table = table([headings[i] for i in columns], [[row[i] for i in columns] for row in rows])
    omitted = len(run.state.hosts) - len(rows)
    notes = [element("p", note) for note in run.settings.notes]
    return join_parts(
        (host_table, element("p", f"and {omitted} more hosts") if omitted else "", *notes)
    )


def _configuration_section(run_reports: Sequence[RunReport], names: Sequence[str]) -> Html:
    parts: list[object] = [_differences(run_reports, names)] if len(run_reports) > 1 else []
    for run, name in zip(run_reports, names, strict=True):
        settings = run.settings
        title = "the resolved configuration"
        if len(run_reports) > 1 or run.runs or run.label:
            title = f"the configuration of {f'run {len(run.runs)} of ' if run.runs else ''}{name}"
        if settings.missing_reason:
            parts.append(element("p", f"{name}: {settings.missing_reason}."))
        if settings.overrides:
            override_elements = (element("code", text) for text in settings.overrides)
            parts.append(element("p", "overrides: ", join_parts(override_elements, " ")))
        if settings.text:
            parts.append(details(title, element("pre", settings.text)))
        parts += [
            details(f"the configuration of run {number} of {name}", element("pre", text))
            for number, text in list_earlier_configurations(run)
        ]
    return section("Configuration, without secrets", *parts)


def _differences(run_reports: Sequence[RunReport], names: Sequence[str]) -> Html:
    options = [run.settings.options for run in run_reports]
    if not all(options):
        return Html()
    keys = dict.fromkeys(key for run_options in options for key in run_options)
    rows = [
        [Cell(key, "key"), *(run_values.get(key, "") for run_values in options)]
        for key in keys
        if len({values.get(key) for values in options}) > 1
    ]
    if not rows:
        return element("p", "The runs have the same configuration.")
    return table(("key", *names), rows, caption="what differs between them")


def _files(run: RunReport) -> Html:
    layout, hosts = Layout(run.state.exp_dir), run.state.hosts
    rows = [("checkpoints", layout.checkpoints), ("TensorBoard", layout.tensorboard)]
    # What a later run of the same directory has written anew is not this one's.
    is_current = not run.settings.missing_reason
    rows += [("configuration", layout.config), ("plan", layout.plan)] if is_current else []
    rows += [("files of each run", layout.runs)] if run.runs else []
    rows = [(description, path) for description, path in rows if path.exists()]
    for host in hosts[:_MAX_HOSTS]:
        host_suffix = f" of {host.name}" if len(hosts) > 1 else ""
        rows += [(f"script{host_suffix}", host.script)] if is_current else []
        rows += [(f"output{host_suffix}", host.output)]
        rows += [(f"logs of ranks{host_suffix}", host.run_dir / RANKS_DIRECTORY)]
    path_table = table(("what", "where"), [[what, Cell(path, "path")] for what, path in rows])
    missing_note = "" if run.state.exp_dir.exists() else "The run's directory is gone. "
    run_id = run.state.run_id
    hint = (
        f"{missing_note}`flagscale logs {run_id}` shows the output, `flagscale query {run_id}` its "
        "state."
    )
    return join_parts((element("p", hint), details("paths", path_table)))
