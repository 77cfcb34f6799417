"""What the network does while arms train: nothing, or an environment that is played."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from flagscale.bench.command_line import did_you_mean
from flagscale.bench.traffic import environment as files
from flagscale.bench.traffic.session import Traffic, play
from flagscale.bench.traffic.spec import Environment, Found, default_tolerance
from flagscale.bench.training.results import NONE, Probed, SessionResult
from flagscale.errors import ConfigError

_LONGEST_SECONDS = 86400.0
"""The most that traffic is played in a session; it ends with the session, or with this process."""
_PROBE_SECONDS = 20.0

Probe = Callable[[], Probed | None]


@dataclass(frozen=True)
class Setting:
    """The network of a session."""

    label: str = NONE
    told: str = "without traffic"
    environment: Environment | None = None

    def judged(
        self, session: SessionResult, before: Probed | None, after: Probed | None
    ) -> SessionResult:
        """A session with what the probe found beside it, and what it was to find."""
        played = self.environment
        if played is None or played.target is None:
            return replace(session, before=before, after=after)
        target, tolerance = played.target, played.tolerance or default_tolerance(played.target)
        return replace(session, before=before, after=after, target=target, tolerance=tolerance)

    @contextmanager
    def played(self, ssh_config: Path | None) -> Iterator[Probe]:
        """Play the traffic until this is left; what tells how the network's tail is.

        Raises:
            UnreachableError: a host cannot be reached, or was lost meanwhile.
        """
        if self.environment is None:
            yield lambda: None
            return
        with play(self.environment, seconds=_LONGEST_SECONDS, ssh_config=ssh_config) as traffic:
            yield lambda: _probed(traffic)
            traffic.check()


def _probed(traffic: Traffic) -> Probed:
    found = traffic.probe(seconds=_PROBE_SECONDS)
    return Probed(found.ratio, found.low, found.high)


def read_settings(paths: Sequence[Path], apart: Sequence[str]) -> tuple[Setting, ...]:
    """No traffic, which all others are compared with; then each file's; then the control.

    Args:
        paths: of environments, as ``flagscale bench traffic`` keeps them.
        apart: ``HOST=ADDRESS`` of the last one's hosts in another network.

    Raises:
        ConfigError: a file is no environment, or an address is of no host of it.
    """
    environments = [files.read(path) for path in paths]
    labels = [_label(path, one) for path, one in zip(paths, environments, strict=True)]
    counts = Counter(labels)
    labels = [
        path.stem if counts[label] > 1 else label for path, label in zip(paths, labels, strict=True)
    ]
    if NONE in labels or len(set(labels)) < len(labels):
        told = ", ".join(labels)
        raise ConfigError(f"--environment: {told}: give the files names that differ, none {NONE!r}")
    found = [Setting()]
    for label, one in zip(labels, environments, strict=True):
        found.append(Setting(label, f"traffic {label} ({_reached(one.found)})", one))
    if apart:
        found.append(_control(apart, environments, labels))
    return tuple(found)


def _label(path: Path, environment: Environment) -> str:
    """The ratio that was asked for, as the guide's tables have it; else the file's name."""
    return path.stem if environment.target is None else f"{environment.target:g}"


def _reached(found: Found | None) -> str:
    return "not calibrated" if found is None else f"p99/p50 {found.words}"


def _control(
    words: Sequence[str], environments: Sequence[Environment], labels: Sequence[str]
) -> Setting:
    if not environments:
        raise ConfigError("--apart needs --environment: whose traffic?")
    last = environments[-1]
    names = [site.name for site in last.hosts]
    addresses: dict[str, str] = {}
    for word in words:
        host, equals, address = word.partition("=")
        if not equals or not address:
            raise ConfigError(f"--apart {word!r}; expected HOST=ADDRESS")
        if host not in names:
            near = did_you_mean(host, names)
            raise ConfigError(f"--apart {word!r}: {host} is no host of the environment{near}")
        addresses[host] = address
    if missing := [name for name in names if name not in addresses]:
        raise ConfigError(f"--apart: an address of {', '.join(missing)} is missing")
    label = f"{labels[-1]} apart"
    # There the probe is to feel nothing of it.
    elsewhere = replace(last.over(addresses), target=None)
    return Setting(label, f"traffic {label}, on another network", elsewhere)
