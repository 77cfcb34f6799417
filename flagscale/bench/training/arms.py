"""Arms of a comparison. An arm is a name for a backend with the environment of its processes.

Imports no torch. Whether a host supports an arm is checked on that host
(:func:`unsupported_reason`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flagscale.accelerators.registry import get_accelerator
from flagscale.bench.options import suggest_name
from flagscale.comm import registry
from flagscale.errors import ConfigError

Variables = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Arm:
    """One way to reduce gradients."""

    name: str
    backend: str
    """Value of ``distributed_backend`` in a YAML."""
    environment: Variables = ()
    exact: bool = True
    """True if its sums equal those of every other exact arm, except for rounding."""

    @property
    def description(self) -> str:
        """Backend and variables: ``fsccl FSCCL_ALGO=ring``."""
        return " ".join([self.backend, *(f"{name}={value}" for name, value in self.environment)])


_ALGORITHMS = ("ring", "tree", "transpose")
_OPTIREDUCE = "optireduce"
# For all_reduce alone: NCCL has no tree for a broadcast, and refuses an operation without
# algorithm.
_NCCL = {"ring": "allreduce:ring", "tree": "allreduce:tree"}
_SUBSYSTEMS = (("NCCL_DEBUG", "INFO"), ("NCCL_DEBUG_SUBSYS", "INIT,TUNING"))
NAMES = (*_ALGORITHMS, _OPTIREDUCE)
"""Arms with a name of their own. The name of any backend is an arm, too."""
# Variables that steer fsccl's reductions. Its adapter lists those that this build supports.
_STEERING_VARIABLES = ("FSCCL_ALGO", "FSCCL_TAIL")
_HOST_MEMORY_VARIABLE = "FSCCL_ALGO"
"""The variable that steers reductions of host memory alone."""
ALGORITHM_VARIABLES = (*_STEERING_VARIABLES, "NCCL_ALGO")
"""Variables that only an arm may set: for all arms they would make two arms equal."""


def resolve_arm(name: str, *, accelerated: bool, one_host: bool, custom: Mapping[str, Arm]) -> Arm:
    """Return the arm with a name.

    Args:
        name: one of :data:`NAMES` or of ``custom``, or a backend.
        accelerated: ranks train on GPUs, where NCCL has rings and trees.
        one_host: all ranks are on one host. fsccl would use shared memory there instead of its
            algorithms between nodes, so each rank becomes a node of its own.
        custom: the user's arms by name.

    Raises:
        ConfigError: there is no such arm (the message has the nearest name), or its variables have
            no effect on this device.
    """
    if name in custom:
        return _check_effective(custom[name], accelerated=accelerated)
    if accelerated and name in _NCCL:
        return Arm(name, "nccl", (("NCCL_ALGO", _NCCL[name]), *_SUBSYSTEMS))
    separate_nodes = (("FSCCL_SHM", "0"),) if one_host else ()
    if name in _ALGORITHMS:
        arm = Arm(name, "fsccl", (("FSCCL_ALGO", name), *separate_nodes))
        return _check_effective(arm, accelerated=accelerated)
    if name == _OPTIREDUCE:
        arm = Arm(name, "fsccl", (("FSCCL_TAIL", "bounded"), *separate_nodes), exact=False)
        return _check_effective(arm, accelerated=accelerated)
    names = (*NAMES, *custom, *registry.list_backend_names())
    if name not in registry.list_backend_names():
        suggestion = suggest_name(name, names)
        raise ConfigError(f"--arms: {name!r} is no arm{suggestion} (known: {', '.join(names)})")
    return Arm(name, name, _SUBSYSTEMS if name == "nccl" else ())


def _check_effective(arm: Arm, *, accelerated: bool) -> Arm:
    """Return the arm if its variables have an effect.

    Raises:
        ConfigError: ranks train on GPUs, where fsccl reduces by other engines.
    """
    steering = [
        f"{name}={value}" for name, value in arm.environment if name == _HOST_MEMORY_VARIABLE
    ]
    if arm.backend == "fsccl" and accelerated and steering:
        raise ConfigError(
            f"arm {arm.name}: {steering[0]} steers sums of host memory alone, so on GPUs it would "
            "train as plain fsccl does",
            hint="--device cpu, or --arms fsccl; ring and tree are NCCL's there",
        )
    return arm


def parse_custom_arms(words: Iterable[str]) -> dict[str, Arm]:
    """Parse the user's arms: ``NAME=BACKEND[,VARIABLE=VALUE ...]``, such as
    ``wide=fsccl,FSCCL_TCP_CONNECTIONS=4``.

    Raises:
        ConfigError: the format is wrong, the backend is unknown, or the name is taken.
    """
    arms: dict[str, Arm] = {}
    for word in words:
        name, equals, rest = word.partition("=")
        backend, *pairs = rest.split(",")
        variables = tuple((key, value) for key, _, value in (pair.partition("=") for pair in pairs))
        well_formed = all(
            "=" in pair and key.isidentifier()
            for pair, (key, _) in zip(pairs, variables, strict=True)
        )
        if not equals or not name.isidentifier() or not backend or not well_formed:
            raise ConfigError(f"--arm {word!r}; expected NAME=BACKEND[,VARIABLE=VALUE ...]")
        if name in (*NAMES, *arms, *registry.list_backend_names()):
            raise ConfigError(f"--arm {word!r}: the name {name!r} is taken")
        registry.get_backend(backend, source=f"--arm {name}")
        lossy = ("FSCCL_TAIL", "bounded") in variables
        arms[name] = Arm(name, backend, variables, exact=not lossy)
    return arms


def unsupported_reason(arm: Arm, device: str) -> str | None:
    """Return the reason why this host does not support the arm for tensors on ``device``; None if
    it does.
    """
    try:
        _check_effective(arm, accelerated=not get_accelerator(device).is_host)
        backend = registry.get_usable_backend(
            arm.backend, device, ("all_reduce",), source=f"arm {arm.name}"
        )
    except ConfigError as error:
        return str(error)
    supported = {option.variable for option in backend.options} | set(backend.environment)
    for variable, value in arm.environment:
        if variable in _STEERING_VARIABLES and variable not in supported:
            return (
                f"arm {arm.name}: {backend.name} here knows no {variable}={value}, so it would "
                "train as it does without; leave the arm out"
            )
    return None


def require_unset(names: Iterable[str], where: str) -> None:
    """Refuse variables that choose an algorithm and are set for all arms.

    Raises:
        ConfigError: one of ``names`` is such a variable.
    """
    variables = set(names)
    if conflicting := [name for name in ALGORITHM_VARIABLES if name in variables]:
        raise ConfigError(
            f"{where}: {', '.join(conflicting)} would be set for every arm, which chooses its own",
            hint="unset it; an arm of your own is --arm NAME=BACKEND,VARIABLE=VALUE",
        )


def require_supported(arms: Sequence[Arm], device: str) -> None:
    """Refuse the first arm that this host does not support.

    Raises:
        ConfigError: there is one.
    """
    for arm in arms:
        if reason := unsupported_reason(arm, device):
            raise ConfigError(reason)
