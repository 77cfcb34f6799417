"""The address at which ranks on several hosts meet: one that every host takes for the first one.

A name may be SSH's alone, an alias that no host can resolve; so the hosts are asked.
"""

from __future__ import annotations

from collections.abc import Sequence

from flagscale.bench.host import PreparedHost, look_up
from flagscale.bench.placement import Placement
from flagscale.errors import UnreachableError
from flagscale.hosts.names import compress
from flagscale.hosts.ssh import SshConfig


def candidates(place: Placement) -> tuple[str, ...]:
    """What the ranks may meet at, the first choice first: what the user says or the first host's
    name, then what the SSH configuration has for that name."""
    first = place.hosts[0]
    given = place.address or ("127.0.0.1" if len(place.hosts) == 1 else first.addr)
    if given:
        return (given,)
    address = SshConfig.load(place.ssh_config).target(first.name).address
    return tuple(dict.fromkeys((first.name, address)))


def known_here(addresses: Sequence[str]) -> str:
    """The first address that this machine can resolve, where the hosts cannot be asked."""
    return next(iter(look_up(addresses)), addresses[0])


def agreed(addresses: Sequence[str], prepared: Sequence[PreparedHost], names: Sequence[str]) -> str:
    """The first address that every host can resolve, and that no host but the first takes for
    itself. ``names`` are what the user calls the hosts.

    Raises:
        UnreachableError: there is none.
    """
    complaints: list[str] = []
    for address in addresses:
        hosts = list(zip(names, prepared, strict=True))
        lost = [name for name, host in hosts if address not in host.known]
        itself = [
            name
            for name, host in hosts
            if host.known.get(address) is False and host.machine != prepared[0].machine
        ]
        if not lost and not itself:
            return address
        complaints += [f"{address} means nothing on {compress(lost)}"] if lost else []
        complaints += (
            [f"{address} is {compress(itself)} itself on {compress(itself)}"] if itself else []
        )
    raise UnreachableError(
        f"nothing was measured: the ranks cannot meet on {names[0]}: {'; '.join(complaints)}",
        hint="give an address of it that every host reaches: --data-collector-host, or addr= in "
        "a hostfile",
    )
