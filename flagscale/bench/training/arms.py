"""What is compared: an arm is a name for a backend and the environment that its processes get.

Imports no torch. Whether an arm can be had on a host is asked there (:func:`refusal`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flagscale.accelerators.registry import accelerator
from flagscale.bench.command_line import did_you_mean
from flagscale.comm import registry
from flagscale.errors import ConfigError

Variables = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Arm:
    """One way to sum gradients."""

    name: str
    backend: str
    """As ``distributed_backend`` of a YAML."""
    environment: Variables = ()
    exact: bool = True
    """Whether its sums are those of every other exact arm, but for rounding."""

    @property
    def told(self) -> str:
        """What it is made of: ``fsccl FSCCL_ALGO=ring``."""
        return " ".join([self.backend, *(f"{name}={value}" for name, value in self.environment)])


_ALGORITHMS = ("ring", "tree", "transpose")
_OPTIREDUCE = "optireduce"
# Of all_reduce alone: a broadcast has no tree, and NCCL refuses what is left without an algorithm.
_NCCL = {"ring": "allreduce:ring", "tree": "allreduce:tree"}
_SUBSYSTEMS = (("NCCL_DEBUG", "INFO"), ("NCCL_DEBUG_SUBSYS", "INIT,TUNING"))
NAMES = (*_ALGORITHMS, _OPTIREDUCE)
"""The arms that have a name of their own; any backend's name is one more."""
# They steer fsccl's sums, and its adapter says which of them this build knows.
_STEERING = ("FSCCL_ALGO", "FSCCL_TAIL")
_OF_HOSTS = "FSCCL_ALGO"
"""The one that steers sums of host memory alone."""
CHOOSING = (*_STEERING, "NCCL_ALGO")
"""Variables that are an arm's alone: set for all arms, they would make two of them one."""


def resolve(name: str, *, accelerated: bool, one_host: bool, custom: Mapping[str, Arm]) -> Arm:
    """The arm that a name stands for on such a machine.

    Args:
        name: of :data:`NAMES`, of ``custom``, or a backend's.
        accelerated: ranks train on GPUs, where NCCL has rings and trees.
        one_host: all ranks are on one host, where fsccl would use shared memory in place of its
            algorithms between hosts: each rank is then a cluster of its own.
        custom: arms that the user has made.

    Raises:
        ConfigError: nothing is called so; the nearest is named. Or it would train as another arm.
    """
    if name in custom:
        return _sound(custom[name], accelerated=accelerated)
    if accelerated and name in _NCCL:
        return Arm(name, "nccl", (("NCCL_ALGO", _NCCL[name]), *_SUBSYSTEMS))
    apart = (("FSCCL_SHM", "0"),) if one_host else ()
    if name in _ALGORITHMS:
        arm = Arm(name, "fsccl", (("FSCCL_ALGO", name), *apart))
        return _sound(arm, accelerated=accelerated)
    if name == _OPTIREDUCE:
        arm = Arm(name, "fsccl", (("FSCCL_TAIL", "bounded"), *apart), exact=False)
        return _sound(arm, accelerated=accelerated)
    known = (*NAMES, *custom, *registry.names())
    if name not in registry.names():
        near = did_you_mean(name, known)
        raise ConfigError(f"--arms: {name!r} is no arm{near} (known: {', '.join(known)})")
    return Arm(name, name, _SUBSYSTEMS if name == "nccl" else ())


def _sound(arm: Arm, *, accelerated: bool) -> Arm:
    """The arm, where what makes it another than its backend alone has an effect.

    Raises:
        ConfigError: ranks train on GPUs, whose memory fsccl sums by engines of its own.
    """
    steering = [f"{name}={value}" for name, value in arm.environment if name == _OF_HOSTS]
    if arm.backend == "fsccl" and accelerated and steering:
        raise ConfigError(
            f"arm {arm.name}: {steering[0]} steers sums of host memory alone, so on GPUs it would "
            "train as plain fsccl does",
            hint="--device cpu, or --arms fsccl; ring and tree are NCCL's there",
        )
    return arm


def parse_custom(words: Iterable[str]) -> dict[str, Arm]:
    """Arms of the user's own: ``NAME=BACKEND[,VARIABLE=VALUE ...]``, such as
    ``wide=fsccl,FSCCL_TCP_CONNECTIONS=4``.

    Raises:
        ConfigError: one is written otherwise, its backend is unknown, or its name is taken.
    """
    found: dict[str, Arm] = {}
    for word in words:
        name, equals, rest = word.partition("=")
        backend, *pairs = rest.split(",")
        variables = tuple((key, value) for key, _, value in (pair.partition("=") for pair in pairs))
        fit = all("=" in pair and key.isidentifier() for pair, (key, _) in zip(pairs, variables))  # noqa: B905
        if not equals or not name.isidentifier() or not backend or not fit:
            raise ConfigError(f"--arm {word!r}; expected NAME=BACKEND[,VARIABLE=VALUE ...]")
        if name in (*NAMES, *found, *registry.names()):
            raise ConfigError(f"--arm {word!r}: the name {name!r} is taken")
        registry.backend(backend, given_by=f"--arm {name}")
        lossy = ("FSCCL_TAIL", "bounded") in variables
        found[name] = Arm(name, backend, variables, exact=not lossy)
    return found


def refusal(arm: Arm, device: str) -> str | None:
    """Why this host cannot have the arm for tensors of ``device``; None where it can."""
    try:
        _sound(arm, accelerated=not accelerator(device).is_host)
        backend = registry.usable(arm.backend, device, ("all_reduce",), given_by=f"arm {arm.name}")
    except ConfigError as error:
        return str(error)
    known = {option.variable for option in backend.options} | set(backend.environment)
    for variable, value in arm.environment:
        if variable in _STEERING and variable not in known:
            return (
                f"arm {arm.name}: {backend.name} here knows no {variable}={value}, so it would "
                "train as it does without; leave the arm out"
            )
    return None


def require_unset(names: Iterable[str], where: str) -> None:
    """Refuse variables for all arms that choose an algorithm, which is what tells arms apart.

    Raises:
        ConfigError: one of ``names`` does.
    """
    given = set(names)
    if taken := [name for name in CHOOSING if name in given]:
        raise ConfigError(
            f"{where}: {', '.join(taken)} would be set for every arm, which chooses its own",
            hint="unset it; an arm of your own is --arm NAME=BACKEND,VARIABLE=VALUE",
        )


def require(arms: Sequence[Arm], device: str) -> None:
    """Refuse the first arm that this host cannot have.

    Raises:
        ConfigError: there is one.
    """
    for arm in arms:
        if reason := refusal(arm, device):
            raise ConfigError(reason)
