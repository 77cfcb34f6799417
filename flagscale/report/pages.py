"""The page of one run, or of several side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from errno import EISDIR
from os import strerror
from pathlib import Path

from flagscale.config.secrets import without_passwords
from flagscale.files import write_atomic
from flagscale.hosts.names import compress, folded
from flagscale.launcher.layout import OLD_OUTPUT_FILE, RANKS_DIRECTORY, Layout
from flagscale.launcher.liveness.diagnosis import Failure
from flagscale.launcher.snapshot import Phase
from flagscale.launcher.state import RunState
from flagscale.report import curves
from flagscale.report.frame import page
from flagscale.report.html import Cell, Html, details, element, facts, join, section, table
from flagscale.report.plot import MARKS, SIGNS, render
from flagscale.report.run import Run, backend, devices, labels, look
from flagscale.report.spikes import GRAD_NORM, LOSS
from flagscale.report.timeline import Happening

_MOST_HOSTS = 256
_MOST_EVENTS = 400
_MOST_CHARACTERS = 20_000
_STATES = {
    **dict.fromkeys((Phase.COMPLETED, Phase.RUNNING), "good"),
    **dict.fromkeys((Phase.FAILED, Phase.LOST, Phase.UNREACHABLE), "bad"),
}
_OFTEN = ("checkpoint", "evaluation")


def write(states: Sequence[RunState], output: Path) -> Path:
    """Write the page of these runs, as they are now, into a file of the user's alone; its path.

    Raises:
        OSError: it cannot be written.
    """
    if output.is_dir():
        raise IsADirectoryError(EISDIR, strerror(EISDIR), str(output))
    text = page_of([look(state) for state in states])
    if output.exists() and not output.is_file():
        output.write_text(text, encoding="utf-8")  # a pipe, or a device
    else:
        write_atomic(output.resolve(), text, durable=False)
    return output


def page_of(found: Sequence[Run]) -> str:
    """The page of these runs: at least one. Whatever of them is text from outside is escaped."""
    names = labels(found)
    moment = _clock(max(run.taken for run in found))
    going = [n for n, run in zip(names, found, strict=True) if not run.seen.phase.ended]
    of = f": {', '.join(going)} may have gone on since" if going else ""
    cards = (_card(run, names[index], index) for index, run in enumerate(found))
    return page(
        " and ".join(names),
        element("div", join(cards), class_="cards"),
        _each(found, names, "What failed", _failures),
        _curves(found),
        section("What happened", _events(found, names)),
        _each(found, names, "Hosts and layout", _hosts),
        _configuration(found, names),
        _each(found, names, "Files", _files),
        note=f"As of {moment}{of}.",
    )


def _each(
    found: Sequence[Run], names: Sequence[str], title: str, part: Callable[[Run], Html]
) -> Html:
    """A section with a part of each run that has something to tell there."""
    parts = [(name, made) for run, name in zip(found, names, strict=True) if (made := part(run))]
    if not parts:
        return Html()
    named = ((element("h3", name) if len(found) > 1 else "", made) for name, made in parts)
    return section(title, *(piece for pair in named for piece in pair))


# -- at the top --------------------------------------------------------------------------------


def _card(run: Run, name: str, index: int) -> Html:
    state, seen = run.state, run.seen
    kind = _STATES.get(seen.phase, "warn")
    pill = element("span", seen.phase.value, class_=f"state {kind}")
    attempts = max(len(run.attempts), seen.attempt)
    hosts = compress(host.name for host in state.hosts)
    counted = f"{state.world_size} {_ranks(state.world_size)} on {len(state.hosts)} "
    return element(
        "article",
        element("h2", name, " ", pill),
        facts(
            {
                "run": state.run_id,
                "model": run.setting.model,
                "program": "" if run.setting.model else run.setting.program,
                "layout": run.setting.layout,
                "batch": run.setting.batch,
                "hosts": f"{counted}{'host' if len(state.hosts) == 1 else 'hosts'}: {hosts}",
                "devices": ", ".join(dict.fromkeys(filter(None, devices(run).values()))),
                "backend": backend(run),
                "step": _progress(run),
                "started": _clock(state.started) if state.started else "",
                "ended" if run.ended else "lasted so far": _end(run),
                "attempts": f"{attempts} of {max(seen.attempts, attempts)}" * (attempts > 1),
                "exit code": "" if seen.exit_code is None else str(seen.exit_code),
                "runner": state.runner.type,
                "YAML": run.config,
                "directory": str(state.exp_dir),
                "not reached": run.trouble,
            }
        ),
        class_=f"card c{curves.colour(index)}",
    )


def _ranks(count: int) -> str:
    return "rank" if count == 1 else "ranks"


def _progress(run: Run) -> str:
    """``150 of 200``, and how long the rest may take."""
    last = max((s for a in run.attempts[-1:] for s in a.steps[-1:]), default=run.seen.step)
    if last is None:
        return ""
    total = next((a.train_steps for a in reversed(run.attempts) if a.train_steps), None)
    left = run.seen.eta_seconds
    rest = f", {_span(left)} left at this pace" if left else ""
    return f"{last:,}" + (f" of {total:,}" if total else "") + rest


def _end(run: Run) -> str:
    started = run.state.started
    if not started:
        return _clock(run.ended) if run.ended else ""
    lasted = _span((run.ended or run.taken) - started)
    return f"{_clock(run.ended)}, after {lasted}" if run.ended else lasted


def _span(seconds: float) -> str:
    """``0:01:11``. Times are what ranks have said, which may be anything."""
    try:
        return str(timedelta(seconds=max(0, round(seconds))))
    except (ValueError, OverflowError):
        return f"{seconds:g} s"


def _clock(moment: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(moment))
    except (ValueError, OverflowError, OSError):
        return f"{moment:g}"


# -- failures and events -----------------------------------------------------------------------


def _failures(run: Run) -> Html:
    seen = run.seen
    parts = []
    if seen.failure is not None:
        parts.append(element("p", element("strong", "The first failure"), class_="bad"))
        parts.append(_failure(seen.failure))
    parts += [
        details(f"attempt {number}: {without_passwords(failure.headline())}", _failure(failure))
        for number, failure in seen.earlier
    ]
    if not parts:
        parts = [element("p", f"attempt {n}: {without_passwords(t)}") for n, t in run.told]
    if seen.warnings:
        lines = (element("li", without_passwords(line)) for line in seen.warnings[:50])
        parts.append(details(f"{len(seen.warnings)} warnings", element("ul", *lines)))
    return join(parts)


def _failure(failure: Failure) -> Html:
    who = "" if failure.rank is None else f"rank {failure.rank}"
    code = "" if failure.exit_code is None else str(failure.exit_code)
    known = {"host": failure.host, "rank": who, "exit code": code, "log": str(failure.log)}
    trace = element("pre", _cut(failure.traceback)) if failure.traceback else ""
    reason = element("pre", _cut(failure.reason))
    return join((reason, facts(known), trace))


def _cut(told: str) -> str:
    """What ranks say, without secrets, as far as somebody may want to read it."""
    return without_passwords(told)[-_MOST_CHARACTERS:]


def _events(found: Sequence[Run], names: Sequence[str]) -> Html:
    every = [(name, one) for run, name in zip(found, names, strict=True) for one in run.happened]
    every.sort(key=lambda pair: pair[1].time or 0.0)
    # Of many, the last checkpoints and evaluations: the others stand on the axis.
    often = [pair for pair in every if pair[1].kind in _OFTEN]
    rare = [pair for pair in every if pair[1].kind not in _OFTEN][:_MOST_EVENTS]
    shown = {id(one) for _, one in (*rare, *often[-max(0, _MOST_EVENTS - len(rare)) or 1 :])}
    kept = [pair for pair in every if id(pair[1]) in shown]
    headings = ["time", "run", "attempt", "step", "", "what"]
    unsaid = {"run"} if len(found) == 1 else set()
    unsaid |= set() if any(one.attempt > 1 for _, one in every) else {"attempt"}
    told = [i for i, heading in enumerate(headings) if heading not in unsaid]
    rows = [[row[i] for i in told] for row in (_event(name, one) for name, one in kept)]
    headings = [headings[i] for i in told]
    left = len(every) - len(kept)
    missing = element("p", f"{left:,} more are left out here.") if left else ""
    made = table(headings, rows, caption=f"in the order of time ({time.strftime('%z')})")
    return details(
        f"{len(every):,} event{'s' if len(every) != 1 else ''}",
        made,
        missing,
        opened=len(rows) <= 30,
    )


def _event(name: str, one: Happening) -> list[object]:
    sign = element("span", SIGNS.get(one.kind, ""), class_=f"sign {one.kind}", aria_hidden="true")
    step = "" if one.step is None else f"{one.step:,}"
    moment = _clock(one.time).rpartition(" ")[0] if one.time else ""
    return [Cell(moment, "time"), name, str(one.attempt), step, sign, one.text]


# -- curves ------------------------------------------------------------------------------------


def _curves(found: Sequence[Run]) -> Html:
    plots = curves.plots(found)
    if not plots:
        why = "no rank has reported a step"
        external = any(run.state.external for run in found)
        why += ", and a program of another project may report none" if external else " so far"
        return section("Curves", element("p", f"There are no metrics: {why}."))
    others = [render(plot) for plot in curves.more(found)]
    return section(
        "Curves",
        element("p", join(_key(), " · "), class_="key"),
        element("div", *map(render, plots), class_="plots"),
        *(element("p", element("small", text)) for text in curves.absent(found)),
        details("more curves", element("div", *others, class_="plots")) if others else "",
        details("how to read them", *(element("p", text) for text in _reading(found))),
    )


def _key() -> Iterator[Html]:
    for kind, meaning in MARKS.items():
        sign = element("span", SIGNS[kind], class_=f"sign {kind}", aria_hidden="true")
        yield join((sign, meaning), " ")


def _reading(found: Sequence[Run]) -> Iterator[str]:
    steps = max((len(a.steps) for run in found for a in run.attempts), default=0)
    yield (
        f"Curves are of the {steps:,} steps that ranks have reported (every log_interval-th). "
        "Where there are more than a plot has room for, steps that follow each other are taken "
        "together, and the lowest and the highest value of each such piece are drawn: no extreme "
        "is left out."
    )
    yield (
        f"A spike of the loss is {LOSS.text()} (as training warns of, at every step); one of the "
        f"gradient norm is {GRAD_NORM.text()}. Of spikes in a row the first is marked."
    )
    yield (
        "What a later attempt did again is faint. An axis is logarithmic where its largest value "
        "is more than ten times the usual one. Arrow keys, Home, End and Page keys move along a "
        "plot."
    )


# -- hosts, configuration, files ---------------------------------------------------------------


def _hosts(run: Run) -> Html:
    kinds, seen = devices(run), {row.host: row for row in run.seen.hosts}
    rows = []
    for host in run.state.hosts[:_MOST_HOSTS]:
        row = seen.get(host.name)
        busy = row.doing if row and not row.phase.ended else ""
        doing = ", ".join(filter(None, (busy, row.trouble, row.waits))) if row else ""
        ranks = folded(host.ranks) if len(host.ranks) else ""
        phase = row.phase.value if row else ""
        place = run.setting.places.get(host.node_rank, "")
        step = "" if row is None or row.step is None else f"{row.step:,}"
        kind = kinds.get(host.node_rank, "")
        rows.append([host.name, str(host.node_rank), ranks, kind, place, phase, step, doing])
    headings = ("host", "node rank", "ranks", "devices", "holds", "state", "step", "doing")
    # What no host has to tell takes no room.
    told = [i for i in range(len(headings)) if any(row[i] for row in rows)]
    made = table([headings[i] for i in told], [[row[i] for i in told] for row in rows])
    left = len(run.state.hosts) - len(rows)
    notes = [element("p", note) for note in run.setting.notes]
    return join((made, element("p", f"and {left} more hosts") if left else "", *notes))


def _configuration(found: Sequence[Run], names: Sequence[str]) -> Html:
    parts: list[object] = [_differences(found, names)] if len(found) > 1 else []
    for run, name in zip(found, names, strict=True):
        own = run.setting
        title = f"the configuration of {name}" if len(found) > 1 else "the resolved configuration"
        if own.absent:
            parts.append(element("p", f"{name}: {own.absent}."))
        if own.overrides:
            typed = (element("code", text) for text in own.overrides)
            parts.append(element("p", "overrides: ", join(typed, " ")))
        if own.text:
            parts.append(details(title, element("pre", own.text)))
    return section("Configuration, without secrets", *parts)


def _differences(found: Sequence[Run], names: Sequence[str]) -> Html:
    options = [run.setting.options for run in found]
    if not all(options):
        return Html()
    keys = dict.fromkeys(key for one in options for key in one)
    rows = [
        [Cell(key, "key"), *(one.get(key, "") for one in options)]
        for key in keys
        if len({one.get(key) for one in options}) > 1
    ]
    if not rows:
        return element("p", "The runs have the same configuration.")
    return table(("key", *names), rows, caption="what differs between them")


def _files(run: Run) -> Html:
    layout, hosts = Layout(run.state.exp_dir), run.state.hosts
    rows = [("checkpoints", layout.checkpoints), ("TensorBoard", layout.tensorboard)]
    # What a later run of the same directory has written anew is not this one's.
    own = not run.setting.absent
    rows += [("configuration", layout.config), ("plan", layout.plan)] if own else []
    rows = [(what, path) for what, path in rows if path.exists()]
    for host in hosts[:_MOST_HOSTS]:
        on = f" of {host.name}" if len(hosts) > 1 else ""
        kept = host.run_dir / OLD_OUTPUT_FILE
        rows += [(f"script{on}", host.script)] if own else []
        rows += [(f"output{on}", kept if kept.exists() else host.output)]
        rows += [(f"logs of ranks{on}", host.run_dir / RANKS_DIRECTORY)]
    made = table(("what", "where"), [[what, Cell(path, "path")] for what, path in rows])
    gone = "" if run.state.exp_dir.exists() else "The run's directory is gone. "
    id_ = run.state.run_id
    hint = f"{gone}`flagscale logs {id_}` shows the output, `flagscale query {id_}` its state."
    return join((element("p", hint), details("paths", made)))
