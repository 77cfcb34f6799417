"""The bed: hosts, the network between them, and the SSH files of a user."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bed.host import Host
from bed.keys import write_key
from bed.namespaces import fresh_network, search_path

Root = Literal["shared", "private"]

HUB_NAME = "hub"
HUB_ADDRESS = "10.77.255.254"
MAX_HOSTS = 64


@dataclass
class Bed:
    """Some hosts and this test process on one switch, without any other network.

    The test is the *hub*, the machine that a user launches from. It reaches each host by its name
    and address, with the identity and the known hosts in :attr:`home`.
    """

    directory: Path
    hosts: list[Host]

    def __getitem__(self, name: str | int) -> Host:
        if isinstance(name, int):
            return self.hosts[name]
        return next(host for host in self.hosts if host.name == name)

    @property
    def names(self) -> list[str]:
        return [host.name for host in self.hosts]

    @property
    def home(self) -> Path:
        """Home directory whose ``.ssh/config`` reaches every host."""
        return self.directory / "home"

    @property
    def ssh_config(self) -> Path:
        return self.home / ".ssh" / "config"

    @property
    def known_hosts(self) -> Path:
        return self.home / ".ssh" / "known_hosts"

    @property
    def identity(self) -> Path:
        """Private key that every account of every host accepts."""
        return self.directory / "identity"

    def environment(self, **more: str) -> dict[str, str]:
        """Return this process's environment with the bed's home and without an SSH agent."""
        inherited = {key: value for key, value in os.environ.items() if key != "SSH_AUTH_SOCK"}
        return {**inherited, "HOME": str(self.home), **more}

    @classmethod
    @contextmanager
    def open(
        cls,
        directory: Path,
        hosts: int | Sequence[str] = 2,
        *,
        root: Root = "shared",
        shared: Sequence[Path] = (),
        users: Sequence[str] = (),
        fabric: bool = False,
    ) -> Iterator[Bed]:
        """Build a bed, move this thread onto its network, and remove both at the end of the block.

        Args:
            root: ``shared``: hosts see this machine's files (a cluster with a shared file system)
                but have their own /tmp, /run and /dev/shm. ``private``: hosts write to a
                private root.
            shared: Directories that are the same on all hosts in either case.
            users: Users that exist on every host in addition to root.
            fabric: Give hosts a second interface, ``fab0``, to which the hub is not connected.
        """
        names = [f"h{i:02d}" for i in range(hosts)] if isinstance(hosts, int) else list(hosts)
        if not 1 <= len(names) <= MAX_HOSTS:
            raise ValueError(f"a bed has 1 to {MAX_HOSTS} hosts, not {len(names)}")
        bed = cls(directory, [_make_host(directory, i, n, fabric) for i, n in enumerate(names)])
        bed._write_files()
        path = os.environ.get("PATH")
        os.environ["PATH"] = search_path()
        try:
            with fresh_network():
                try:
                    bed._start(root, shared, users)
                    yield bed
                finally:
                    for host in bed.hosts:
                        host.cut_power()
                    for host in bed.hosts:
                        host.wait_until_dead()
        finally:
            os.environ["PATH"] = path or os.defpath

    def _write_files(self) -> None:
        self.known_hosts.parent.mkdir(parents=True)
        write_key(self.identity)
        hosts, known_hosts = [f"127.0.0.1 localhost\n{HUB_ADDRESS} {HUB_NAME}\n"], []
        for host in self.hosts:
            host.directory.mkdir()
            public = write_key(host.directory / "hostkey")
            host.write_sshd_config()
            known_hosts.append(f"{host.name},{host.address} {public}\n")
            hosts.append(f"{host.address} {host.name}\n")
            if host.fabric_address:
                hosts.append(f"{host.fabric_address} {host.name}-fabric\n")
        (self.directory / "etc_hosts").write_text("".join(hosts))
        self.known_hosts.write_text("".join(known_hosts))
        self.ssh_config.write_text(
            f"Host *\n  User root\n  IdentityFile {self.identity}\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self.known_hosts}\n  GlobalKnownHostsFile /dev/null\n"
            "  StrictHostKeyChecking yes\n  BatchMode yes\n  LogLevel ERROR\n"
        )

    def _start(self, root: Root, shared: Sequence[Path], users: Sequence[str]) -> None:
        mounts = [str(self.directory / "etc_hosts"), "/etc/hosts"]
        subprocess.run(["mount", "--bind", *mounts], check=True)
        for host in self.hosts:
            host.spawn(root, shared, users)
        _run_ip(
            "link set lo up",
            "link add br0 type bridge forward_delay 0",
            f"addr add {HUB_ADDRESS}/16 dev br0",
            "link set br0 up",
            "link add br1 type bridge forward_delay 0",
            "link set br1 up",
        )
        for host in self.hosts:
            host.wait_until_ready()
        _run_ip(*(line for host in self.hosts for line in _connect_host(host)))
        for host in self.hosts:
            host.send_commands("network", "sshd")
        for host in self.hosts:
            host.wait_for_replies(2)
        for host in self.hosts:
            host.wait_for_banner()


def _make_host(directory: Path, index: int, name: str, fabric: bool) -> Host:
    number = f"{index // 250}.{index % 250 + 1}"
    return Host(
        name=name,
        address=f"10.77.{number}",
        fabric_address=f"10.78.{number}" if fabric else None,
        directory=directory / f"host{index}",
        bed_directory=directory,
        veth=f"veth{index}",
    )


def _connect_host(host: Host) -> Iterator[str]:
    """Yield the ``ip -batch`` lines that create the host's network interfaces, and write the lines
    for their ends on the host to its ``network`` file.
    """
    host_lines = ["link set lo up"]
    cables = [(host.veth, "eth0", "br0", host.address)]
    if host.fabric_address:
        cables.append((host.veth.replace("veth", "fab"), "fab0", "br1", host.fabric_address))
    for outer, inner, bridge, address in cables:
        yield f"link add {outer} type veth peer name {inner} netns {host.pid}"
        yield f"link set {outer} master {bridge} up"
        host_lines += [f"addr add {address}/16 dev {inner}", f"link set {inner} up"]
    (host.directory / "network").write_text("\n".join(host_lines) + "\n")


def _run_ip(*lines: str) -> None:
    subprocess.run(["ip", "-batch", "-"], input="\n".join(lines) + "\n", text=True, check=True)
