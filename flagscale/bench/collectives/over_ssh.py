"""Running the benchmark on hosts behind SSH, through the launcher's transport.

Every host is reached before any rank starts, and told over one connection what to run. A rank's
end with an error, a lost host or a signal to this process ends all: a host ends its ranks when
the connection that brought them is closed.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flagscale.bench.collectives import addresses
from flagscale.bench.collectives.carried import Carried
from flagscale.bench.collectives.spec import Placement
from flagscale.bench.host import Order, Prepared
from flagscale.bench.spawn import Share, handed_on, interruptible, python_path
from flagscale.errors import ConfigError, FlagscaleError, UnreachableError
from flagscale.hosts.reach import describe, require_all
from flagscale.hosts.ssh import (
    Connection,
    DialOptions,
    Fleet,
    HostError,
    Outcome,
    SshConfig,
    SshTarget,
)
from flagscale.hosts.ssh.files import RemoteFiles

# Longer than a host takes to end its own ranks, so that it can still say why.
_GRACE_SECONDS = 12.0
_PREPARE_SECONDS = 60.0
_LARGEST_CODE = 4
_LOGS = "logs"


@dataclass(frozen=True)
class _Site:
    """One host and its part."""

    number: int
    target: SshTarget
    first: int
    count: int


def run_over_ssh(
    place: Placement,
    program: Sequence[str],
    words: Sequence[str],
    environment: Mapping[str, str],
    *,
    dumps: bool = False,
    options: DialOptions | None = None,
) -> int:
    """Run ``program``, what follows the interpreter, with ``words`` as the ranks of ``place``.

    Files that ``words`` name are copied to the hosts and back; ``dumps``: with a directory of what
    a failed check leaves. The exit code is rank 0's host's own, or that of the first other host
    that failed.

    Raises:
        UnreachableError: a host cannot be reached, by us or by the others, or was lost in the
            middle.
        ConfigError: a host has no flagscale at this machine's path.
    """
    sites = _sites(place)
    carried = Carried.of(words, dumps=dumps)
    with interruptible(), Fleet([site.target for site in sites], options=options) as fleet:
        prepared, address = _prepare(fleet, sites, carried, addresses.candidates(place))
        port = place.port or prepared[0].port

        def order(site: _Site) -> Order:
            scratch = prepared[site.number].scratch
            return Order(
                command=(*program, *carried.words(scratch)),
                count=site.count,
                share=Share(site.first, place.workers or 1, address, port),
                environment=handed_on(environment),
                directory=str(Path.cwd()),
                scratch=scratch,
                log_dir=None if place.log_dir is None else f"{scratch}/{_LOGS}",
            )

        run = _Run(fleet, sites, carried, place.log_dir)
        return run.run([order(site) for site in sites])


def _sites(place: Placement) -> list[_Site]:
    config = SshConfig.load(place.ssh_config)
    sites, first = [], 0
    for number, (host, share) in enumerate(zip(place.hosts, place.shares, strict=True)):
        target = config.target(host.name, user=host.user, port=host.port, proxy=host.proxy)
        sites.append(_Site(number, target, first, share))
        first += share
    return sites


def _command(*words: str) -> list[str]:
    python = ["env", f"PYTHONPATH={python_path()}", sys.executable]
    return [*python, "-m", "flagscale.bench.host", *words]


def _prepare(
    fleet: Fleet, sites: Sequence[_Site], carried: Carried, choices: Sequence[str]
) -> tuple[list[Prepared], str]:
    """Every host's port and directory, with the files in it; and which of the addresses ``choices``
    all of them can meet at. Where a host fails, all are clean again."""
    outcomes = fleet.map(lambda connection: _prepare_one(connection, carried, choices))
    errors = {n: outcome.error for n, outcome in enumerate(outcomes) if outcome.error is not None}
    names = [site.target.name for site in sites]
    try:
        require_all(errors, names, "nothing was measured")
        prepared = [outcome.get() for outcome in outcomes]
        return prepared, addresses.agreed(choices, prepared, names)
    except FlagscaleError:
        scratch = {o.target: o.value.scratch for o in outcomes if o.value is not None}
        fleet.map(lambda c: _clean(c, scratch[c.target]), targets=list(scratch))
        raise


def _prepare_one(connection: Connection, carried: Carried, choices: Sequence[str]) -> Prepared:
    done = connection.run(_command("prepare", *choices), timeout=_PREPARE_SECONDS)
    if not done.ok:
        said = done.error_text.strip().splitlines() or [f"exit code {done.exit_status}"]
        raise ConfigError(
            f"{connection.target.name}: {sys.executable} there cannot run the benchmark: "
            f"{said[-1]}",
            hint="flagscale and its Python must be at the same path on every host",
        )
    prepared = Prepared(**json.loads(done.text))
    try:
        _send(connection, carried, prepared.scratch)
    except FlagscaleError:
        _clean(connection, prepared.scratch)
        raise
    return prepared


def _send(connection: Connection, carried: Carried, scratch: str) -> None:
    with RemoteFiles(connection) as files:
        for local, name in carried.read:
            files.put(local, f"{scratch}/{name}")
        for name, text in carried.texts(scratch):
            files.write(f"{scratch}/{name}", text.encode())
        for _, name in (*carried.written, *carried.directories):
            files.make_directories(f"{scratch}/{name}".rpartition("/")[0])


def _clean(connection: Connection, scratch: str) -> None:
    with suppress(HostError):
        connection.run(_command("clean", scratch), timeout=_PREPARE_SECONDS)


def _get_all(files: RemoteFiles, directory: str, local: Path) -> None:
    """Every file of a directory, which has no other in it."""
    for name in files.names(directory):
        files.get(f"{directory}/{name}", local / name)


class _Run:
    """All hosts at work, until the last has ended or the first has failed."""

    def __init__(
        self, fleet: Fleet, sites: Sequence[_Site], carried: Carried, logs: Path | None
    ) -> None:
        self._fleet, self._sites, self._carried = fleet, sites, carried
        self._logs = logs
        self._numbers = {site.target: site.number for site in sites}
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._ended_by_us = threading.Event()
        self._lost: dict[int, FlagscaleError] = {}

    def run(self, orders: Sequence[Order]) -> int:
        """Carry out each host's order; the exit code of the whole."""
        try:
            outcomes = self._fleet.map(
                lambda connection: self._one(connection, orders), on_done=self._done
            )
        finally:
            if self._timer is not None:
                self._timer.cancel()
        if self._lost:
            names = [site.target.name for site in self._sites]
            raise UnreachableError(f"lost in the middle:\n{describe(self._lost, names)}")
        codes = [outcome.value or 0 for outcome in outcomes if outcome.ok]
        code = next((code for code in codes if code), 0)
        return code if code <= _LARGEST_CODE else 1

    def _one(self, connection: Connection, orders: Sequence[Order]) -> int:
        order = orders[self._numbers[connection.target]]
        result = connection.run(
            _command("run"),
            stdin=order.encode(),
            timeout=None,
            on_stdout=self._writer(sys.stdout.buffer.write, sys.stdout.flush),
            on_stderr=self._writer(sys.stderr.buffer.write, sys.stderr.flush),
        )
        self._fetch(connection, order)
        return result.exit_status

    def _writer(
        self, write: Callable[[bytes], object], flush: Callable[[], object]
    ) -> Callable[[bytes], object]:
        def hand_on(data: bytes) -> None:
            with self._lock:
                write(data)
                flush()

        return hand_on

    def _fetch(self, connection: Connection, order: Order) -> None:
        """Bring what rank 0 wrote, complete or not, and what every host has of logs and of failed
        checks; leave nothing behind."""
        with RemoteFiles(connection) as files:
            for local, name in self._carried.written if order.share.first == 0 else ():
                if files.size(f"{order.scratch}/{name}") is not None:
                    files.get(f"{order.scratch}/{name}", local)
            for local, name in self._carried.directories:
                for case in files.names(f"{order.scratch}/{name}"):
                    _get_all(files, f"{order.scratch}/{name}/{case}", local / case)
            if self._logs is not None:
                _get_all(files, f"{order.scratch}/{_LOGS}", self._logs)
        _clean(connection, order.scratch)

    def _done(self, outcome: Outcome[int]) -> None:
        """Runs in the main thread, as hosts end."""
        if outcome.error is not None and not self._ended_by_us.is_set():
            self._lost[self._numbers[outcome.target]] = outcome.error
        if (outcome.error is not None or outcome.value) and self._timer is None:
            self._timer = threading.Timer(_GRACE_SECONDS, self._end_all)
            self._timer.daemon = True
            self._timer.start()

    def _end_all(self) -> None:
        self._ended_by_us.set()
        self._fleet.close()
