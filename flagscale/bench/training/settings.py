"""Network settings of ``flagscale bench training``: no traffic, or traffic that is replayed.

Traffic is described by files of ``flagscale bench traffic``, called environments
(:mod:`flagscale.bench.traffic.spec`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from flagscale.bench.options import suggest_name
from flagscale.bench.traffic import environment as environment_files
from flagscale.bench.traffic.session import Traffic, play
from flagscale.bench.traffic.spec import Environment, ProbeResult, default_tolerance
from flagscale.bench.training.results import NO_TRAFFIC, SessionResult, TailRatio
from flagscale.errors import ConfigError

_MAX_TRAFFIC_SECONDS = 86400.0
"""Time limit of the traffic. It normally ends with the session, or with this process."""
_PROBE_SECONDS = 20.0

MeasureTail = Callable[[], TailRatio | None]
"""Function that measures the probe's tail ratio; it returns None without traffic."""


@dataclass(frozen=True)
class NetworkSetting:
    """The network during a session."""

    label: str = NO_TRAFFIC
    description: str = "without traffic"
    environment: Environment | None = None

    def add_tail_ratios(
        self, session: SessionResult, before: TailRatio | None, after: TailRatio | None
    ) -> SessionResult:
        """Add the probe's tail ratios, and their target, to the result of a session."""
        environment = self.environment
        if environment is None or environment.target is None:
            return replace(session, before=before, after=after)
        target = environment.target
        tolerance = environment.tolerance or default_tolerance(target)
        return replace(session, before=before, after=after, target=target, tolerance=tolerance)

    @contextmanager
    def play_traffic(self, ssh_config: Path | None) -> Iterator[MeasureTail]:
        """Generate the traffic until the context ends. Yields a function that measures the tail
        ratio.

        Raises:
            UnreachableError: a host cannot be reached, or was lost meanwhile.
        """
        if self.environment is None:
            yield lambda: None
            return
        with play(self.environment, seconds=_MAX_TRAFFIC_SECONDS, ssh_config=ssh_config) as traffic:
            yield lambda: _measure_tail(traffic)
            traffic.check()


def _measure_tail(traffic: Traffic) -> TailRatio:
    result = traffic.probe(seconds=_PROBE_SECONDS)
    return TailRatio(result.ratio, result.low, result.high)


def read_settings(paths: Sequence[Path], apart: Sequence[str]) -> tuple[NetworkSetting, ...]:
    """Return the network settings: without traffic, with which all others are compared; one per
    file; and, with ``apart``, a control with the last file's traffic on another network.

    Args:
        paths: files of environments, as ``flagscale bench traffic`` writes them.
        apart: ``HOST=ADDRESS`` of the last environment's hosts on another network.

    Raises:
        ConfigError: a file is no environment, or an address belongs to no host of it.
    """
    environments = [environment_files.read_environment(path) for path in paths]
    labels = [
        _setting_label(path, environment)
        for path, environment in zip(paths, environments, strict=True)
    ]
    counts = Counter(labels)
    labels = [
        path.stem if counts[label] > 1 else label for path, label in zip(paths, labels, strict=True)
    ]
    if NO_TRAFFIC in labels or len(set(labels)) < len(labels):
        names = ", ".join(labels)
        raise ConfigError(
            f"--environment: {names}: give the files names that differ, none {NO_TRAFFIC!r}"
        )
    settings = [NetworkSetting()]
    for label, environment in zip(labels, environments, strict=True):
        description = f"traffic {label} ({_describe_calibration(environment.found)})"
        settings.append(NetworkSetting(label, description, environment))
    if apart:
        settings.append(_control_setting(apart, environments, labels))
    return tuple(settings)


def _setting_label(path: Path, environment: Environment) -> str:
    """Return the label of a setting in tables: the calibrated ratio, or the file's name."""
    return path.stem if environment.target is None else f"{environment.target:g}"


def _describe_calibration(result: ProbeResult | None) -> str:
    return "not calibrated" if result is None else f"p99/p50 {result.label}"


def _control_setting(
    assignments: Sequence[str], environments: Sequence[Environment], labels: Sequence[str]
) -> NetworkSetting:
    """Return the control: the last environment's traffic at the addresses ``HOST=ADDRESS``."""
    if not environments:
        raise ConfigError("--apart needs --environment: whose traffic?")
    last = environments[-1]
    names = [site.name for site in last.hosts]
    addresses: dict[str, str] = {}
    for word in assignments:
        host, equals, address = word.partition("=")
        if not equals or not address:
            raise ConfigError(f"--apart {word!r}; expected HOST=ADDRESS")
        if host not in names:
            suggestion = suggest_name(host, names)
            raise ConfigError(
                f"--apart {word!r}: {host} is not a host of the environment{suggestion}"
            )
        addresses[host] = address
    if missing := [name for name in names if name not in addresses]:
        raise ConfigError(f"--apart: an address of {', '.join(missing)} is missing")
    label = f"{labels[-1]} apart"
    # The probe must not be affected by traffic on that network, so there is no target.
    control = replace(last.on_network(addresses), target=None)
    return NetworkSetting(label, f"traffic {label}, on another network", control)
