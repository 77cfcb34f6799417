"""The options of torchrun (torch 2.11 to 2.13), so that a mistyped one is found without torch."""

from __future__ import annotations

PASSED_ON = frozenset(
    {
        "duplicate_stderr_filters",
        "duplicate_stdout_filters",
        "event_log_handler",
        "local_addr",
        "local_ranks_filter",
        "logs_specs",
        "monitor_interval",
        "numa_binding",
        "rdzv_conf",
        "role",
        "shutdown_timeout",
        "signals_to_handle",
        "start_method",
        "virtual_local_rank",
    }
)
"""Options that ``experiment.runner`` hands to torchrun as they are."""

SET_BY_LAUNCHER = {
    "node_rank": "the launcher numbers the hosts in the order of the hostfile",
    "standalone": "without a hostfile the launcher starts on this machine alone",
    "module": "`experiment.task.entrypoint` is the path of a script",
    "no_python": "`experiment.task.entrypoint` is the path of a Python script",
    "run_path": "`experiment.task.entrypoint` is the path of a script",
}
"""Options that cannot be given, with the reason."""
