"""Options of torchrun (torch 2.11 to 2.13), so that a mistyped one is reported without torch."""

from __future__ import annotations

from collections.abc import Mapping

from flagscale.config.arguments.spec.argument import Argument
from flagscale.config.runner_schema import MAX_TIMEOUT_SECONDS

_TEXT_OPTIONS = (
    "duplicate_stderr_filters",
    "duplicate_stdout_filters",
    "event_log_handler",
    "local_addr",
    "local_ranks_filter",
    "logs_specs",
    "numa_binding",
    "rdzv_conf",
    "role",
    "signals_to_handle",
)
_TYPED_OPTIONS = (
    Argument("monitor_interval", kind="float", doc="", minimum=0.001, maximum=3600),
    Argument("shutdown_timeout", kind="int", doc="", minimum=0, maximum=MAX_TIMEOUT_SECONDS),
    Argument("start_method", kind="str", doc="", choices=("spawn", "fork", "forkserver")),
    Argument("virtual_local_rank", kind="bool", doc=""),
)
TORCHRUN_OPTIONS: Mapping[str, Argument] = {
    option.name: option
    for option in (*(Argument(name, kind="str", doc="") for name in _TEXT_OPTIONS), *_TYPED_OPTIONS)
}
"""Options that ``experiment.runner`` passes to torchrun unchanged."""

REFUSED_TORCHRUN_OPTIONS = {
    "standalone": "without a hostfile the launcher starts on this machine alone",
    "module": "`experiment.task.entrypoint` is the path of a script",
    "no_python": "`experiment.task.entrypoint` is the path of a Python script",
    "run_path": "`experiment.task.entrypoint` is the path of a script",
}
"""Options of torchrun that cannot be set, with the reason."""
