"""Command line of ``flagscale bench traffic``: parsed into a :class:`TrafficPlan`.

The tail is the ratio p99/p50 of the times of the probe, and an environment is a set of hosts,
flows and bursts that can be stored and replayed (:mod:`.spec`).
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flagscale.bench.collectives.sizes import parse_size
from flagscale.bench.files import require_writable
from flagscale.bench.options import BenchParser, suggest_name
from flagscale.bench.placement import parse_host_names, read_host_list
from flagscale.bench.traffic import compat
from flagscale.bench.traffic.environment import check_environment, read_environment
from flagscale.bench.traffic.session import MAX_SESSION_SECONDS, PROBE_SAMPLES
from flagscale.bench.traffic.spec import (
    DISTRIBUTIONS,
    FLOW_LAYOUTS,
    PROBE_KINDS,
    Environment,
    Flow,
    Pattern,
    Probe,
    TrafficHost,
    default_tolerance,
    flows_between,
)
from flagscale.errors import ConfigError
from flagscale.hosts.hostfile import Host, is_this_machine

LOAD, HEAVY_LOAD, HEAVY_TAIL = 0.06, 0.1, 2.0
"""Default load of each flow as a fraction of the path's rate, and the heavier load for requested
tails from HEAVY_TAIL on: the few large bursts of the lighter load would hardly give such a tail.
"""
_RATE_PATTERN = re.compile(
    r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[kmg]?)(?:bit(?:/s)?|bps)?", re.IGNORECASE
)
_PATTERN_FLAGS = (
    "flow",
    "between",
    "transport",
    "rate",
    "load",
    "peak",
    "burst",
    "bursts",
    "gaps",
    "seed",
)
_UNIT_FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_DEFAULT_BURST, _DEFAULT_CALIBRATION_SECONDS = 64 << 10, 300.0
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
class TrafficPlan:
    """Parsed command line."""

    environment: Environment
    measure_rate: bool
    """Measure the path's rate with the probe. The load is a fraction of it."""
    seconds: float
    """Duration of the traffic after calibration."""
    tail: float | None
    """Requested p99/p50 of the probe; None: no calibration."""
    calibration_limit_seconds: float
    probe_interval_seconds: float
    """Time between two measurements of the tail; infinite: none."""
    probe_samples: int
    """Samples of a measurement."""
    environment_output: Path | None
    """File for the environment, to be replayed."""
    json_output: Path | None
    """File for rates and ratios of this run."""
    plain_output: bool
    """Print lines instead of a live table."""
    ssh_config: Path | None
    interface: str | None
    port: int
    notes: tuple[str, ...]
    """Notes on flags of ``run_background.sh`` (:mod:`.compat`)."""


def parse_command(words: Sequence[str], prog: str) -> TrafficPlan:
    """Parse a command line.

    Raises:
        ConfigError: a flag or value is wrong, or hosts are missing.
    """
    options = _parser(prog).parse(words)
    notes = compat.translate(options)
    _check_values(options)
    _check_combinations(options)
    replayed = read_environment(options.replay) if options.replay else None
    if replayed:
        _check_replay(options)
    environment = replayed or _make_environment(options)
    tail: float | None = options.tail
    if tail is not None:
        tolerance = options.tolerance or default_tolerance(tail)
        environment = replace(environment, target=tail, tolerance=tolerance, found=None)
    measure_rate = not replayed and options.rate is None
    check_environment(environment, str(options.replay) if replayed else "flagscale bench traffic")
    if options.probe_every is None:
        options.probe_every = min(60.0, options.seconds)
    return TrafficPlan(
        environment=environment,
        measure_rate=measure_rate,
        seconds=options.seconds,
        tail=tail,
        calibration_limit_seconds=options.within or _DEFAULT_CALIBRATION_SECONDS,
        probe_interval_seconds=math.inf if options.probe == "none" else options.probe_every,
        probe_samples=options.probe_samples or PROBE_SAMPLES,
        environment_output=options.environment,
        json_output=options.json,
        plain_output=options.plain,
        ssh_config=options.ssh_config,
        interface=options.interface,
        port=options.port,
        notes=tuple(notes),
    )


def _parser(prog: str) -> BenchParser:
    text = "Background traffic between hosts, calibrated to a tail: p99 / p50 of a probe."
    parser = BenchParser(prog, text, _EXAMPLES)
    _add_host_flags(parser)
    _add_pattern_flags(parser)
    _add_tail_flags(parser)
    add = parser.add_argument_group("files").add_argument
    add("--environment", type=Path, metavar="FILE", help="write the environment, to be replayed")
    add("--replay", type=Path, metavar="FILE", help="play a file of --environment")
    add("--json", type=Path, metavar="FILE", help="write rates and ratios of this run as JSON")
    add("--plain", action="store_true", help="print lines instead of a live table")
    compat.add_flags(parser)
    return parser


def _add_host_flags(parser: BenchParser) -> None:
    add = parser.add_argument_group("hosts and flows").add_argument
    add("--hosts", nargs="+", action="extend", default=[], metavar="HOST", help="two or more hosts")
    add(
        "--hosts-file",
        type=Path,
        metavar="FILE",
        help="hostfile of the launcher, or one host per line",
    )
    add("--ssh-config", type=Path, metavar="FILE", help="SSH configuration (~/.ssh/config)")
    add(
        "--between",
        choices=FLOW_LAYOUTS,
        help="flows between neighbours two by two, around a ring, or between every two (pairs)",
    )
    add(
        "--flow",
        action="append",
        default=[],
        metavar="FROM:TO",
        help="a single flow by host names, instead of --between; may be repeated",
    )
    add(
        "--interface",
        metavar="NAME",
        help="interface by which packets leave the hosts (by their routes)",
    )
    add("--port", type=int, default=0, help="port at which hosts receive flows (a free one)")


def _add_pattern_flags(parser: BenchParser) -> None:
    add = parser.add_argument_group("pattern").add_argument
    add("--transport", choices=("tcp", "udp"), help="transport of the flows (tcp)")
    add(
        "--rate",
        type=_parse_rate,
        metavar="RATE",
        help="rate of the path, such as 250mbit or 10gbit (measured by the probe)",
    )
    add(
        "--load",
        default=None,
        metavar="SHARE",
        help=(
            "of each flow on average, such as 6%% of the rate, or 15mbit (6%%; from --tail 2 10%%)"
        ),
    )
    add("--burst", type=_parse_size, metavar="SIZE", help="mean size of a burst (64K)")
    add("--bursts", choices=DISTRIBUTIONS, help="distribution of burst sizes (exponential)")
    add("--gaps", choices=DISTRIBUTIONS, help="distribution of the gaps (exponential)")
    add(
        "--peak",
        type=_parse_rate,
        metavar="RATE",
        help="highest rate within a burst (tcp: unlimited; udp: --rate)",
    )
    add("--seed", type=int, metavar="N", help="seed of sizes and gaps (0)")
    add(
        "--seconds",
        type=float,
        default=60.0,
        metavar="S",
        help="duration after calibration (60)",
    )


def _add_tail_flags(parser: BenchParser) -> None:
    add = parser.add_argument_group("tail").add_argument
    add(
        "--tail",
        type=float,
        metavar="RATIO",
        help="calibrate the bursts to this p99 / p50 of the probe, such as 1.5 or 3",
    )
    add(
        "--tolerance",
        type=float,
        metavar="X",
        help="accepted error of the ratio and of its 95%% interval (a 15th of --tail)",
    )
    add("--within", type=float, metavar="S", help="longest duration of the calibration (300)")
    add(
        "--probe",
        default=None,
        metavar="KIND:SIZE",
        help="ring:SIZE, the messages of a ring all_reduce; echo:SIZE; or none (ring:256K)",
    )
    add(
        "--probe-every",
        type=float,
        metavar="S",
        help="seconds between two measurements of the tail (60)",
    )
    add("--probe-samples", type=int, metavar="N", help="samples of a measurement (300)")


def _check_values(options: argparse.Namespace) -> None:
    for flag, value, limit in (
        ("--seconds", options.seconds, MAX_SESSION_SECONDS),
        ("--within", options.within, 86400.0),
        ("--probe-every", options.probe_every, math.inf),
        ("--tolerance", options.tolerance, 100.0),
    ):
        if value is not None and not 0 < value <= limit:
            bound = "" if math.isinf(limit) else f", at most {limit:g}"
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


def _check_combinations(options: argparse.Namespace) -> None:
    """Refuse flags that exclude each other, or have no effect without another one."""
    for flag, value in (("--tolerance", options.tolerance), ("--within", options.within)):
        if options.tail is None and value is not None:
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


def _make_environment(options: argparse.Namespace) -> Environment:
    """Return the environment that the flags describe."""
    hosts = _traffic_hosts(options)
    flows = tuple(_parse_flow(word, hosts) for word in options.flow)
    rate = options.rate or 1e9
    load_fraction = HEAVY_LOAD if (options.tail or 0) >= HEAVY_TAIL else LOAD
    load = _parse_load(options.load, load_fraction, rate, measured=options.rate is None)
    pattern = Pattern(
        rate=rate,
        load=load,
        burst=float(options.burst or _DEFAULT_BURST),
        transport=options.transport or "tcp",
        bursts=options.bursts or "exponential",
        gaps=options.gaps or "exponential",
        peak=options.peak,
        seed=options.seed or 0,
    )
    flows_per_pair = flows or flows_between(len(hosts), options.between or "pairs")
    if options.guide_flows:
        flows_per_pair = flows_per_pair * max(1, options.guide_flows // len(flows_per_pair))
    return Environment(hosts, flows_per_pair, pattern, _parse_probe(options.probe))


def _check_replay(options: argparse.Namespace) -> None:
    """Refuse flags whose values a replayed file defines."""
    replayed_values = {
        **{f"--{name}": getattr(options, name) for name in _PATTERN_FLAGS},
        "--probe": options.probe if options.probe != "none" else None,
        "-s": options.guide_size,
    }
    if conflicting := [flag for flag, value in replayed_values.items() if value not in (None, [])]:
        raise ConfigError(
            f"{conflicting[0]}: not supported with --replay, whose file sets it; omit it"
        )


def _traffic_hosts(options: argparse.Namespace) -> tuple[TrafficHost, ...]:
    if options.hosts and options.hosts_file:
        raise ConfigError("--hosts and --hosts-file exclude each other")
    hosts = parse_host_names(options.hosts) or read_host_list(options.hosts_file)
    if not hosts:
        raise ConfigError("which hosts? give --hosts, --hosts-file or --replay")
    if len(hosts) < 2:
        raise ConfigError(
            f"traffic needs two hosts, and {hosts[0].name} is one",
            hint="name the other one too: --hosts A B",
        )
    return tuple(to_traffic_host(host) for host in hosts)


def to_traffic_host(host: Host) -> TrafficHost:
    """Return a host of the launcher as a traffic host; this machine is used without SSH."""
    via = host.via or ("local" if is_this_machine(host.name) else "ssh")
    address = host.addr or host.name
    return TrafficHost(
        host.name,
        addr=address,
        flow_addr=None,
        via=via,
        user=host.user,
        port=host.port,
        proxy=host.proxy,
    )


def _parse_flow(word: str, hosts: tuple[TrafficHost, ...]) -> Flow:
    names = [site.name for site in hosts]
    source, _, target = word.partition(":")
    for name in (source, target):
        if name not in names:
            suggestion = suggest_name(name, names)
            raise ConfigError(f"--flow {word!r}: {name!r} is none of the hosts{suggestion}")
    return Flow(names.index(source), names.index(target))


def _parse_load(text: str | None, default_fraction: float, rate: float, *, measured: bool) -> float:
    """Return the bit/s of ``6%`` or ``15mbit``; by default ``default_fraction`` of the rate.
    ``measured``: the rate will be measured, so that a load in bit/s is refused.
    """
    if text is None:
        return default_fraction * rate
    if text.endswith("%"):
        try:
            return float(text[:-1]) / 100 * rate
        except ValueError:
            raise ConfigError(f"--load {text!r}; expected such as 6% or 15mbit") from None
    if measured:
        raise ConfigError("--load in bit/s needs --rate; a share such as 6% does not")
    try:
        return _parse_rate(text)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"--load {error}") from None


def _parse_probe(text: str | None) -> Probe:
    if text in (None, "none"):
        return Probe()
    kind, colon, size = str(text).partition(":")
    probe_kind = next((known_kind for known_kind in PROBE_KINDS if known_kind == kind), None)
    if probe_kind is not None:
        return Probe(probe_kind, parse_size(size)) if colon else Probe(probe_kind)
    suggestion = suggest_name(kind, (*PROBE_KINDS, "none"))
    raise ConfigError(f"--probe {text!r}; expected ring:SIZE, echo:SIZE or none{suggestion}")


def _parse_rate(text: str) -> float:
    match = _RATE_PATTERN.fullmatch(text.strip())
    if match is None or not float(match["number"]):
        raise argparse.ArgumentTypeError(f"{text!r}; expected such as 250mbit or 10gbit")
    return float(match["number"]) * _UNIT_FACTORS[match["unit"].lower()]


def _parse_size(text: str) -> int:
    try:
        return parse_size(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(error.message) from None
