"""The command line of ``flagscale bench traffic``, and the plan that it amounts to."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flagscale.bench.collectives.sizes import parse_size
from flagscale.bench.command_line import Parser, did_you_mean
from flagscale.bench.files import require_writable
from flagscale.bench.placement import listed_hosts, named_hosts
from flagscale.bench.traffic import compat
from flagscale.bench.traffic.environment import check, read
from flagscale.bench.traffic.session import MOST_SECONDS, PROBE_SAMPLES
from flagscale.bench.traffic.spec import (
    BETWEEN,
    KINDS,
    LAWS,
    Environment,
    Flow,
    Pattern,
    Probe,
    Site,
    default_tolerance,
    flows_between,
)
from flagscale.errors import ConfigError
from flagscale.hosts.hostfile import Host, is_this_machine

LOAD, HEAVY_LOAD, HEAVY_TAIL = 0.06, 0.1, 2.0
"""Of each flow, where nothing is said: a share of the path's rate; the heavier one from that tail
on, which so few large bursts as the lighter one has would hardly give."""
_RATE = re.compile(
    r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[kmg]?)(?:bit(?:/s)?|bps)?", re.IGNORECASE
)
_PATTERN = (
    *("flow", "between", "transport", "rate", "load", "peak"),
    *("burst", "bursts", "gaps", "seed"),
)
_RATES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_BURST, _WITHIN = 64 << 10, 300.0
_LARGEST_PORT = 65535
_EXAMPLES = """\
examples
  flagscale bench traffic --hosts node[1-4] --rate 10gbit --seconds 600
      bursts at 6 % of 10 Gbit/s a flow, 1 to 2, 2 to 1, 3 to 4 and back, for 10 minutes
  flagscale bench traffic --hosts-file hostfile --rate 1gbit --tail 3 --environment three.json
      find the bursts at which a 256 KiB all_reduce has p99 / p50 of 3, and keep them
  flagscale bench traffic --replay three.json --seconds 3600 --probe-every 300
      the same traffic for an hour, looked at every five minutes
  flagscale bench traffic -s 4 -t 240000 -m 10.0.2.253
      the words of run_background.sh are known; each is told what it became

Nothing is sent to an address that has not answered a keyed hello. All ends with this command,
however it ends, and at its time.
"""


@dataclass(frozen=True)
class Plan:
    """What a command line amounts to."""

    environment: Environment
    measure_rate: bool
    """The path's rate is to be found by the probe; the load is :data:`LOAD` of it."""
    seconds: float
    tail: float | None
    within: float
    probe_every: float
    """Seconds between two looks; infinite: none."""
    probe_samples: int
    keep: Path | None
    result: Path | None
    plain: bool
    ssh_config: Path | None
    interface: str | None
    port: int
    notes: tuple[str, ...]
    """What became of the guide's flags."""


def parse(words: Sequence[str], prog: str) -> Plan:
    """The plan of a command line.

    Raises:
        ConfigError: a flag or value is wrong, or hosts are missing.
    """
    options = _parser(prog).parse(words)
    notes = compat.translate(options)
    _check(options)
    _check_together(options)
    given = read(options.replay) if options.replay else None
    if given:
        _refuse_changes(options)
    environment = given or _made(options)
    tail: float | None = options.tail
    if tail is not None:
        tolerance = options.tolerance or default_tolerance(tail)
        environment = replace(environment, target=tail, tolerance=tolerance, found=None)
    measured = not given and options.rate is None
    check(environment, str(options.replay) if given else "flagscale bench traffic")
    if options.probe_every is None:
        options.probe_every = min(60.0, options.seconds)
    return Plan(
        environment,
        measured,
        options.seconds,
        tail,
        options.within or _WITHIN,
        math.inf if options.probe == "none" else options.probe_every,
        options.probe_samples or PROBE_SAMPLES,
        options.environment,
        options.json,
        options.plain,
        options.ssh_config,
        options.interface,
        options.port,
        tuple(notes),
    )


def _parser(prog: str) -> Parser:
    text = "Background traffic between hosts, calibrated to a tail: p99 / p50 of a probe."
    parser = Parser(prog, text, _EXAMPLES)
    _add_where(parser)
    _add_what(parser)
    _add_tail(parser)
    add = parser.add_argument_group("files").add_argument
    add("--environment", type=Path, metavar="FILE", help="keep what was found, to be replayed")
    add("--replay", type=Path, metavar="FILE", help="play what --environment kept")
    add("--json", type=Path, metavar="FILE", help="rates and ratios of this run, whole")
    add("--plain", action="store_true", help="lines in place of a live table")
    compat.add_flags(parser)
    return parser


def _add_where(parser: Parser) -> None:
    add = parser.add_argument_group("where").add_argument
    add("--hosts", nargs="+", action="extend", default=[], metavar="HOST", help="two or more")
    add("--hosts-file", type=Path, metavar="FILE", help="a host a line, or the launcher's hostfile")
    add("--ssh-config", type=Path, metavar="FILE", help="instead of ~/.ssh/config")
    text = "flows: of neighbours two by two, around a ring, or of every two (pairs)"
    add("--between", choices=BETWEEN, help=text)
    text = "a flow of its own, by names; may be repeated, in place of --between"
    add("--flow", action="append", default=[], metavar="FROM:TO", help=text)
    add("--interface", metavar="NAME", help="packets leave the hosts by this one (by their routes)")
    add("--port", type=int, default=0, help="where hosts receive flows (a free one)")


def _add_what(parser: Parser) -> None:
    add = parser.add_argument_group("what").add_argument
    add("--transport", choices=("tcp", "udp"), help="(tcp)")
    text = "of the path, such as 250mbit or 10gbit (found by the probe)"
    add("--rate", type=_rate, metavar="RATE", help=text)
    text = "of each flow on average, such as 6%% of the rate, or 15mbit (6%%; from --tail 2 10%%)"
    add("--load", default=None, metavar="SHARE", help=text)
    add("--burst", type=_size, metavar="SIZE", help="mean (64K)")
    add("--bursts", choices=LAWS, help="law of their sizes (exponential)")
    add("--gaps", choices=LAWS, help="law of the gaps (exponential)")
    text = "the most within a burst (tcp: as fast as it goes; udp: the rate)"
    add("--peak", type=_rate, metavar="RATE", help=text)
    add("--seed", type=int, metavar="N", help="of sizes and gaps (0)")
    text = "how long to play, calibration not counted (60)"
    add("--seconds", type=float, default=60.0, metavar="S", help=text)


def _add_tail(parser: Parser) -> None:
    add = parser.add_argument_group("tail").add_argument
    text = "steer the bursts until p99 / p50 of the probe is this, such as 1.5 or 3"
    add("--tail", type=float, metavar="RATIO", help=text)
    text = "how far off the ratio may be, and how wide its 95%% interval (a 15th of --tail)"
    add("--tolerance", type=float, metavar="X", help=text)
    text = "the most that calibration takes (300)"
    add("--within", type=float, metavar="S", help=text)
    text = "ring:SIZE, a ring all_reduce's messages; echo:SIZE; none: do not look (ring:256K)"
    add("--probe", default=None, metavar="KIND:SIZE", help=text)
    text = "between two looks at the tail while playing (60)"
    add("--probe-every", type=float, metavar="S", help=text)
    add("--probe-samples", type=int, metavar="N", help="of a look (300)")


def _check(options: argparse.Namespace) -> None:
    for flag, value, most in (
        ("--seconds", options.seconds, MOST_SECONDS),
        ("--within", options.within, 86400.0),
        ("--probe-every", options.probe_every, math.inf),
        ("--tolerance", options.tolerance, 100.0),
    ):
        if value is not None and not 0 < value <= most:
            bound = "" if math.isinf(most) else f", at most {most:g}"
            raise ConfigError(f"{flag} {value:g}; expected more than 0{bound}")
    if options.tail is not None and not 1 < options.tail <= 100:
        raise ConfigError(f"--tail {options.tail:g}; expected a ratio above 1, such as 1.5 or 3")
    if not 0 <= options.port <= _LARGEST_PORT:
        raise ConfigError(f"--port {options.port}; expected 1 to {_LARGEST_PORT}")
    if not 20 <= (options.probe_samples or PROBE_SAMPLES) <= 20000:
        raise ConfigError(f"--probe-samples {options.probe_samples}; expected 20 to 20000")
    for flag, path in (("--environment", options.environment), ("--json", options.json)):
        if path is not None:
            require_writable(path, flag)


def _check_together(options: argparse.Namespace) -> None:
    """Refuse flags that exclude each other, or have no effect without another one."""
    for flag, of_tail in (("--tolerance", options.tolerance), ("--within", options.within)):
        if options.tail is None and of_tail is not None:
            raise ConfigError(f"{flag} needs --tail")
    if options.flow and options.between:
        raise ConfigError("--flow and --between exclude each other")
    if options.probe == "none" and (options.probe_every or options.probe_samples):
        raise ConfigError("--probe none has nothing to look with; leave --probe-... out")
    if options.tail is not None and options.probe == "none":
        raise ConfigError("--tail needs a probe; --probe none has none")
    if options.replay and (options.hosts or options.hosts_file):
        raise ConfigError("--replay has its own hosts; --hosts and --hosts-file exclude it")
    if options.replay and options.environment == options.replay:
        raise ConfigError("--environment is the file of --replay; name another one")


def _made(options: argparse.Namespace) -> Environment:
    """An environment of flags."""
    sites = _sites(options)
    flows = tuple(_flow(word, sites) for word in options.flow)
    rate = options.rate or 1e9
    share = HEAVY_LOAD if (options.tail or 0) >= HEAVY_TAIL else LOAD
    load = _load(options.load, share, rate, measured=options.rate is None)
    pattern = Pattern(
        rate=rate,
        load=load,
        burst=float(options.burst or _BURST),
        transport=options.transport or "tcp",
        bursts=options.bursts or "exponential",
        gaps=options.gaps or "exponential",
        peak=options.peak,
        seed=options.seed or 0,
    )
    between = flows or flows_between(len(sites), options.between or "pairs")
    if options.guide_flows:
        between = between * max(1, options.guide_flows // len(between))
    return Environment(sites, between, pattern, _probe(options.probe))


def _refuse_changes(options: argparse.Namespace) -> None:
    """What is played says what a file has; calibrating begins where that stands."""
    fixed = {
        **{f"--{name}": getattr(options, name) for name in _PATTERN},
        "--probe": options.probe if options.probe != "none" else None,
        "-s": options.guide_size,
    }
    if given := [flag for flag, value in fixed.items() if value not in (None, [])]:
        raise ConfigError(f"{given[0]}: what --replay plays says that; leave it out")


def _sites(options: argparse.Namespace) -> tuple[Site, ...]:
    if options.hosts and options.hosts_file:
        raise ConfigError("--hosts and --hosts-file exclude each other")
    hosts = named_hosts(options.hosts) or listed_hosts(options.hosts_file)
    if not hosts:
        raise ConfigError("which hosts? give --hosts, --hosts-file or --replay")
    if len(hosts) < 2:
        raise ConfigError(
            f"traffic needs two hosts, and {hosts[0].name} is one",
            hint="name the other one too: --hosts A B",
        )
    return tuple(site_of(host) for host in hosts)


def site_of(host: Host) -> Site:
    """A host of the launcher's as a site: this machine without SSH."""
    via = host.via or ("local" if is_this_machine(host.name) else "ssh")
    address = host.addr or host.name
    return Site(host.name, address, None, via, host.user, host.port, host.proxy)


def _flow(word: str, sites: tuple[Site, ...]) -> Flow:
    names = [site.name for site in sites]
    source, _, target = word.partition(":")
    for name in (source, target):
        if name not in names:
            near = did_you_mean(name, names)
            raise ConfigError(f"--flow {word!r}: {name!r} is none of the hosts{near}")
    return Flow(names.index(source), names.index(target))


def _load(text: str | None, share: float, rate: float, *, measured: bool) -> float:
    """Bit/s of ``6%`` or ``15mbit``; without them of ``share``."""
    if text is None:
        return share * rate
    if text.endswith("%"):
        try:
            return float(text[:-1]) / 100 * rate
        except ValueError:
            raise ConfigError(f"--load {text!r}; expected such as 6% or 15mbit") from None
    if measured:
        raise ConfigError("--load in bit/s needs --rate; a share such as 6% does not")
    try:
        return _rate(text)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"--load {error}") from None


def _probe(text: str | None) -> Probe:
    if text in (None, "none"):
        return Probe()
    kind, colon, size = str(text).partition(":")
    chosen = next((one for one in KINDS if one == kind), None)
    if chosen is not None:
        return Probe(chosen, parse_size(size)) if colon else Probe(chosen)
    near = did_you_mean(kind, (*KINDS, "none"))
    raise ConfigError(f"--probe {text!r}; expected ring:SIZE, echo:SIZE or none{near}")


def _rate(text: str) -> float:
    found = _RATE.fullmatch(text.strip())
    if found is None or not float(found["number"]):
        raise argparse.ArgumentTypeError(f"{text!r}; expected such as 250mbit or 10gbit")
    return float(found["number"]) * _RATES[found["unit"].lower()]


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(error.message) from None
