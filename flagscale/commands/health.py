"""``flagscale health``: check the hardware of hosts without a run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from flagscale.accelerators.registry import AUTO
from flagscale.commands.argument_types import split_hosts
from flagscale.errors import ConfigError, UnreachableError

if TYPE_CHECKING:
    from flagscale.config.schema import Runner
    from flagscale.health.session import HealthResult
    from flagscale.hosts.hostfile import Host

SICK_EXIT_CODE = 4
"""Exit code if a host is sick; benchmarks that fall below their baseline have the same."""


def add_health_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``flagscale health``."""
    parser.add_argument(
        "--hosts",
        metavar="HOST,...",
        help="hosts over SSH, such as a,b or node[01-16]; default: this machine",
    )
    parser.add_argument(
        "--hosts-file", type=Path, metavar="FILE", help="hostfile, as experiment.runner.hostfile"
    )
    parser.add_argument("--ssh-config", type=Path, metavar="FILE", help="as in ssh -F")
    parser.add_argument(
        "--device", default=AUTO, metavar="KIND", help="kind of device to measure; default: auto"
    )
    parser.add_argument(
        "--full", action="store_true", help="measure longer, and everything twice (about a minute)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument(
        "--page",
        nargs="?",
        type=Path,
        const=Path("health.html"),
        metavar="FILE",
        help="also write an HTML page; default: health.html in the current directory",
    )


def check_hosts_health(
    options: argparse.Namespace,
    words: list[str],
    write_page: Callable[[HealthResult, Path], Path],
) -> int:
    """Check hosts, print the result, and return 0 if all are healthy, 3 if one could not be
    measured, or 4 if one is sick."""
    from flagscale.accelerators.registry import explain_unusable_kind
    from flagscale.health.judgement import Severity
    from flagscale.health.rows import list_undecided, sort_hosts, to_json
    from flagscale.health.session import HealthTarget, check_health
    from flagscale.launcher.preflight.hardware import make_checks
    from flagscale.launcher.runners import endpoints

    if words:
        raise ConfigError(f"unknown argument {words[0]}", hint="flagscale health -h")
    if reason := explain_unusable_kind(options.device):
        raise ConfigError(f"--device: {reason}")
    runner, hosts = select_hosts(options)
    targets = [HealthTarget(host.name, options.device, host.addr or "") for host in hosts]
    handle = endpoints.make_handle(runner, hosts)
    with endpoints.open_hosts(handle, [host.name for host in hosts]) as connections:
        result = check_health(connections, targets, full=options.full)
    page = write_page(result, options.page) if options.page is not None else None
    if options.json:
        print(json.dumps(to_json(result), indent=2, ensure_ascii=False))
    else:
        from flagscale.hosts.names import compress_names
        from flagscale.launcher.show import view

        view.make_console().print(view.checks_table(make_checks(result)))
        for title, names in sort_hosts(result).items():
            if names:
                print(f"{title}: {compress_names(names)}")
        if undecided := list_undecided(result):
            print(f"not compared (see above): {', '.join(undecided)}")
        if page is not None:
            print(f"page: {page}")
    if result.judgement.hosts_with(Severity.SICK):
        return SICK_EXIT_CODE
    return UnreachableError.exit_code if result.judgement.hosts_with(Severity.UNCLEAR) else 0


def select_hosts(options: argparse.Namespace) -> tuple[Runner, tuple[Host, ...]]:
    """Return the hosts, and the settings of a runner for them."""
    from flagscale.config.schema import Runner
    from flagscale.hosts.hostfile import choose_hosts, parse_host_list, read_hostfile

    if options.hosts is not None and options.hosts_file is not None:
        raise ConfigError("--hosts and --hosts-file exclude each other")
    names = split_hosts(options.hosts) if options.hosts is not None else []
    listed_hosts = parse_host_list(names, "--hosts") if names else None
    if options.hosts_file is not None:
        listed_hosts = read_hostfile(options.hosts_file)
    runner = Runner(hosts=tuple(names), hostfile=options.hosts_file, ssh_config=options.ssh_config)
    return runner, choose_hosts(listed_hosts, options.hosts_file, None)
