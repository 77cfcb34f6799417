"""Arms of the comparison by ``flagscale bench training``: backends with environment variables.

An *arm*, as in a clinical trial, is one of the compared ways to reduce gradients. An *exact* arm
reduces all gradients; others, such as fsccl's bounded all_reduce, may leave out late data. That
one is selected by ``FSCCL_TAIL=bounded`` and named ``optireduce``, after the paper whose idea it
follows (OptiReduce, NSDI '25; see ``docs/design/bounded-all-reduce.md``). Arms are named on the
command line (``--arms``, ``--arm``). Whether a host supports an arm is checked on that host
(:func:`unsupported_reason`). Imports no torch.
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
    """One of the compared ways to reduce gradients."""

    name: str
    backend: str
    """Value of ``distributed_backend`` in a YAML."""
    environment: Variables = ()
    exact: bool = True
    """True if its reductions equal those of every other exact arm, except for rounding."""

    @property
    def description(self) -> str:
        """Backend and variables: ``fsccl FSCCL_ALGO=ring``."""
        return " ".join([self.backend, *(f"{name}={value}" for name, value in self.environment)])


_ALGORITHMS = ("ring", "tree", "transpose")
_OPTIREDUCE = "optireduce"
# Limited to all_reduce: NCCL has no tree for a broadcast, and would refuse it.
_NCCL_ALGORITHMS = {"ring": "allreduce:ring", "tree": "allreduce:tree"}
# NCCL's log shows the algorithm of each all_reduce.
_NCCL_LOG_VARIABLES = (("NCCL_DEBUG", "INFO"), ("NCCL_DEBUG_SUBSYS", "INIT,TUNING"))
PREDEFINED_NAMES = (*_ALGORITHMS, _OPTIREDUCE)
"""Names of the predefined arms. The name of any backend is an arm too."""
# Variables that select fsccl's algorithm. Its adapter lists those that this build supports.
_FSCCL_VARIABLES = ("FSCCL_ALGO", "FSCCL_TAIL")
_HOST_MEMORY_VARIABLE = "FSCCL_ALGO"
"""Variable that affects only reductions of host memory; on GPUs fsccl reduces by other engines."""
ALGORITHM_VARIABLES = (*_FSCCL_VARIABLES, "NCCL_ALGO")
"""Variables that select an algorithm. Only arms may set them: if they were set for the whole
command, arms that differ in the algorithm would become equal.
"""


def resolve_arm(name: str, *, accelerated: bool, one_host: bool, custom: Mapping[str, Arm]) -> Arm:
    """Return the arm with a name.

    Args:
        name: one of :data:`PREDEFINED_NAMES` or of ``custom``, or a backend.
        accelerated: ranks train on GPUs, where ``ring`` and ``tree`` are NCCL's.
        one_host: all ranks are on one host. There fsccl would use shared memory instead of its
            algorithms between nodes, so ``FSCCL_SHM=0`` is set.
        custom: the user's arms by name.

    Raises:
        ConfigError: there is no such arm (the message has the nearest name), or its variables have
            no effect on this device.
    """
    if name in custom:
        return _require_effect(custom[name], accelerated=accelerated)
    if accelerated and name in _NCCL_ALGORITHMS:
        return Arm(name, "nccl", (("NCCL_ALGO", _NCCL_ALGORITHMS[name]), *_NCCL_LOG_VARIABLES))
    separate_nodes = (("FSCCL_SHM", "0"),) if one_host else ()
    if name in _ALGORITHMS:
        arm = Arm(name, "fsccl", (("FSCCL_ALGO", name), *separate_nodes))
        return _require_effect(arm, accelerated=accelerated)
    if name == _OPTIREDUCE:
        return Arm(name, "fsccl", (("FSCCL_TAIL", "bounded"), *separate_nodes), exact=False)
    names = (*PREDEFINED_NAMES, *custom, *registry.list_backend_names())
    if name not in registry.list_backend_names():
        suggestion = suggest_name(name, names)
        raise ConfigError(f"--arms: {name!r} is not an arm{suggestion} (known: {', '.join(names)})")
    return Arm(name, name, _NCCL_LOG_VARIABLES if name == "nccl" else ())


def _require_effect(arm: Arm, *, accelerated: bool) -> Arm:
    """Return the arm, unless it sets :data:`_HOST_MEMORY_VARIABLE` and ranks train on GPUs.

    Raises:
        ConfigError: the variable would have no effect.
    """
    ineffective = [
        f"{name}={value}" for name, value in arm.environment if name == _HOST_MEMORY_VARIABLE
    ]
    if arm.backend == "fsccl" and accelerated and ineffective:
        raise ConfigError(
            f"arm {arm.name}: {ineffective[0]} affects only reductions of host memory, so on GPUs "
            "it would be the same as arm fsccl",
            hint="--device cpu, or --arms fsccl; on GPUs the arms ring and tree are NCCL's",
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
        name, separator, definition = word.partition("=")
        backend, *assignments = definition.split(",")
        variables = tuple(
            (key, value)
            for key, _, value in (assignment.partition("=") for assignment in assignments)
        )
        well_formed = all(
            "=" in assignment and key.isidentifier()
            for assignment, (key, _) in zip(assignments, variables, strict=True)
        )
        if not separator or not name.isidentifier() or not backend or not well_formed:
            raise ConfigError(f"--arm {word!r}; expected NAME=BACKEND[,VARIABLE=VALUE ...]")
        if name in (*PREDEFINED_NAMES, *arms, *registry.list_backend_names()):
            raise ConfigError(f"--arm {word!r}: the name {name!r} is taken")
        registry.get_backend(backend, source=f"--arm {name}")
        is_bounded = ("FSCCL_TAIL", "bounded") in variables
        arms[name] = Arm(name, backend, variables, exact=not is_bounded)
    return arms


def unsupported_reason(arm: Arm, device: str) -> str | None:
    """Return the reason why this host does not support the arm for tensors on ``device``; None if
    it does.
    """
    try:
        _require_effect(arm, accelerated=not get_accelerator(device).is_host)
        backend = registry.get_usable_backend(
            arm.backend, device, ("all_reduce",), source=f"arm {arm.name}"
        )
    except ConfigError as error:
        return str(error)
    supported = {option.variable for option in backend.options} | set(backend.environment)
    for variable, value in arm.environment:
        if variable in _FSCCL_VARIABLES and variable not in supported:
            return (
                f"arm {arm.name}: {backend.name} on this host does not support {variable}={value}, "
                "which would have no effect; omit the arm"
            )
    return None


def require_unset(names: Iterable[str], source: str) -> None:
    """Refuse variables that choose an algorithm and are set for all arms. ``source`` names the
    origin of the variables in the message.

    Raises:
        ConfigError: one of ``names`` is such a variable.
    """
    variables = set(names)
    if conflicting := [name for name in ALGORITHM_VARIABLES if name in variables]:
        raise ConfigError(
            f"{source}: {', '.join(conflicting)} would be set for every arm, but arms select "
            "their own",
            hint="unset it; --arm NAME=BACKEND,VARIABLE=VALUE defines an arm with it",
        )


def require_supported(arms: Sequence[Arm], device: str) -> None:
    """Refuse the first arm that this host does not support.

    Raises:
        ConfigError: there is one.
    """
    for arm in arms:
        if reason := unsupported_reason(arm, device):
            raise ConfigError(reason)
