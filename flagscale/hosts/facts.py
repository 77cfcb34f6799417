"""What a host is like: cores, devices, the interface to the master, its clock, old runs.

Asked of every host before a run is planned, so it is bash without a process more than needed.
Where a preflight is wanted, the same program looks at where the run will write and what it needs,
and tells what the host's Python is like, see :mod:`.python_world`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flagscale import checkpoints
from flagscale.accelerators import probes
from flagscale.hosts import probe
from flagscale.hosts import python_world as world
from flagscale.hosts.executor import Executor
from flagscale.hosts.program import PROGRAMS, Answer, Value, program, source
from flagscale.hosts.program import ask as ask_host
from flagscale.hosts.python_world import World
from flagscale.status import RUN_ID_VARIABLE, STATUS_DIR_VARIABLE

NOT_WRITABLE = "not writable"
NOT_A_DIRECTORY = "not a directory"
_SECONDS = 60.0


@dataclass(frozen=True)
class PathState:
    """What is where a run will write on a host: ``existing`` is there already, ``unfit`` says why
    ``user`` can't write there. ``free``: bytes, where the host can tell."""

    existing: str
    unfit: str = ""
    user: str = ""
    free: int | None = None


@dataclass(frozen=True)
class ModuleQuestion:
    """What a ``module`` of this project, run on the host by its own Python with ``words``, is to
    answer: one line of JSON, kept under ``name``. ``environment``: the variables of the ranks, as
    :func:`flagscale.config.interpolation.parts` takes them apart, since what refers to the host's
    own is put together there."""

    name: str
    module: str
    words: Sequence[str]
    project: str
    environment: Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Need:
    """What a preflight asks beyond that: the directories of this project and of the experiment
    there, ``paths`` that must exist, others that will be ``written``, the directory to ``load`` a
    checkpoint from, whether code is ``compared``, what modules of the project are ``asked`` there
    (``asked_of_checkpoints``: where ``load`` holds any), and whether its Python is asked although
    nothing ``fresh`` happened to it."""

    project: str
    exp_dir: str
    paths: Sequence[str] = ()
    written: Sequence[str] = ()
    load: str = ""
    compared: bool = False
    asked: Sequence[ModuleQuestion] = ()
    asked_of_checkpoints: Sequence[ModuleQuestion] = ()
    fresh: bool = False


@dataclass(frozen=True)
class Question:
    """What is asked of one host. ``port``: None for no port, 0 for any free one. ``agents_port``:
    the port at which agents meet, where it is to be free as well; None for one beside ``port``
    where that is any, and for none where it is not."""

    master: str
    log_root: str
    python: str
    setup: str = ""
    port: int | None = None
    agents_port: int | None = None
    need: Need | None = None


@dataclass(frozen=True)
class Facts:
    """What a host answered."""

    cpus: int | None
    devices: Mapping[str, int]
    """Of each kind of chip that it has, how many."""
    interface: str | None
    boot_id: str
    skew: float
    """Seconds by which its clock is ahead of ours, as little as the answer allows."""
    products: Mapping[str, str] = field(default_factory=dict)
    """What their makers call those, where the host can tell."""
    port: int | None = None
    busy_port: int | None = None
    port_holder: str = ""
    alive: str = ""
    """The id of a run of this directory that is alive there."""
    python: World | None = None
    python_error: str = ""
    address: str = ""
    loopback: bool = False
    """Whether the master's address means this very host there."""
    project: bool = False
    """Whether this project is where it should be."""
    missing: tuple[str, ...] = ()
    """The needed paths that do not exist."""
    exp_dir: PathState | None = None
    """The experiment's directory."""
    written: Mapping[str, PathState] = field(default_factory=dict)
    """The others that will be written, by path."""
    checkpoints: tuple[str, ...] = ()
    """The names of the checkpoints, whole or not, where one would be loaded from."""

    def answer(self, name: str) -> Mapping[str, Any] | None:
        """What its Python answered to a question; None where it was not asked."""
        return self.python.answers.get(name) if self.python else None


def ask(executor: Executor, question: Question) -> Facts:
    """Ask one host."""
    before = time.time()
    answer = ask_host(executor, text(question), _SECONDS)
    found = read(answer, question, before, time.time())
    if question.need is not None and answer.get("kept") and found.python is None:
        # What was kept there is spoilt in a way that only shows here.
        return ask(executor, replace(question, need=replace(question.need, fresh=True)))
    return found


def text(question: Question) -> str:
    """The program for one host."""
    given: dict[str, Value] = {
        "master": question.master,
        "port": {None: "", 0: "any"}.get(question.port, str(question.port)),
        "agents_port": str(question.agents_port or ""),
        "log_root": question.log_root,
        "mark": f"{STATUS_DIR_VARIABLE}={question.log_root}/",
        "id_variable": RUN_ID_VARIABLE,
        "setup": question.setup,
        "python": question.python,
        "not_writable": NOT_WRITABLE,
        "not_a_directory": NOT_A_DIRECTORY,
        "checkpoint_name": checkpoints.NAME,
        "tracker": checkpoints.TRACKER,
        "looks": probes.looks(),
    }
    need, more = question.need, list[str]()
    if need is not None:
        given |= {"thorough": "yes", "project": need.project, "exp_dir": need.exp_dir}
        given |= {"load": need.load, "needed": need.paths, "written": need.written}
        asked = (need.project, question.python, question.setup)
        given |= world.given(*asked, compared=need.compared, fresh=need.fresh)
        given |= {"asked": _as_json(need.asked)}
        given |= {"asked_of_checkpoints": _as_json(need.asked_of_checkpoints)}
        more.append(source(PROGRAMS / "python_world.sh"))
    more.append(source(PROGRAMS / "ports.sh"))
    return program(PROGRAMS / "facts.sh", given, *more, world.python_function())


def _as_json(questions: Sequence[ModuleQuestion]) -> list[str]:
    return [json.dumps(vars(question)) for question in questions]


def read(answer: Answer, question: Question, before: float, after: float) -> Facts:
    """The facts in an answer to a question that was asked between these two moments."""
    clock = answer.get("clock").replace(",", ".")
    theirs = float(clock) if clock else before
    skew = theirs - before if theirs < before else max(0.0, theirs - after)
    paths, written = (question.need.paths, question.need.written) if question.need else ((), ())
    states = {path: _path_state(answer, f"_{number}") for number, path in enumerate(written)}
    return Facts(
        cpus=answer.number("cpus") or None,
        devices={kind: n for kind in probes.looks() if (n := answer.number(f"count_{kind}"))},
        interface=answer.get("interface") or None,
        boot_id=answer.get("boot_id"),
        skew=skew,
        products={k: name for k in probes.looks() if (name := answer.get(f"product_{k}"))},
        port=answer.number("port"),
        busy_port=answer.number("busy_port"),
        port_holder=answer.get("port_holder"),
        alive=answer.get("alive"),
        python=world.read(answer.get("python")),
        python_error=answer.get("python_error"),
        address=answer.get("address"),
        loopback=answer.get("loopback") == "yes",
        project=answer.get("project") == "yes",
        missing=tuple(paths[int(number)] for number in answer.get("absent").split()),
        exp_dir=_path_state(answer),
        written={path: state for path, state in states.items() if state is not None},
        checkpoints=tuple(answer.get("checkpoints").split()),
    )


def _path_state(answer: Answer, suffix: str = "") -> PathState | None:
    existing = answer.get(f"existing{suffix}")
    if not existing:
        return None
    unfit, user = answer.get(f"unfit{suffix}"), answer.get("user")
    return PathState(existing, unfit, user, answer.number(f"free{suffix}"))


def packages_of(facts: Sequence[Facts]) -> list[str]:
    """The packages that any of the hosts has, in the order of :data:`.probe.PACKAGES`."""
    there = {name for one in facts if one.python for name in one.python.packages}
    return [name for name in probe.PACKAGES if name in there]
