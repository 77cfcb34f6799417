"""Accounting of a bed's Slurm: a database, slurmdbd, and an account of a user."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from support.waiting import PATIENCE_SECONDS

PROGRAMS = ("slurmdbd", "sacct", "sacctmgr", "mariadbd", "mariadb-install-db")

_LOOPBACK_ADDRESS = "127.0.0.1"
_DATABASE_PORT, _ACCOUNTING_PORT = 3306, 6819
_CONFIGURATION = """\
AuthType=auth/munge
AuthInfo=socket={directory}/munge.sock
DbdHost={hub}
DbdAddr={here}
DbdPort={port}
SlurmUser=root
PidFile={directory}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost={here}
StoragePort={database_port}
StorageUser=slurm
StoragePass=bed
StorageLoc=slurm
"""
# Address in the bed's network, which no other process can reach.
_GRANTS = """\
CREATE USER slurm@'127.0.0.1' IDENTIFIED BY 'bed';
CREATE USER slurm@'localhost' IDENTIFIED BY 'bed';
GRANT ALL ON slurm.* TO slurm@'127.0.0.1';
GRANT ALL ON slurm.* TO slurm@'localhost';
"""


def accounting_settings(directory: Path) -> Mapping[str, str]:
    """Return the slurm.conf settings that enable accounting and enforce limits."""
    return {
        "AccountingStorageType": "accounting_storage/slurmdbd",
        "AccountingStorageHost": _LOOPBACK_ADDRESS,
        "AccountingStoragePort": str(_ACCOUNTING_PORT),
        "AccountingStoragePass": f"{directory}/munge.sock",
        "AccountingStorageEnforce": "associations,limits,qos",
    }


@contextmanager
def run_accounting(directory: Path) -> Iterator[None]:
    """Run a database and slurmdbd; munged has to be running."""
    data, grants = directory / "database", directory / "grants.sql"
    grants.write_text(_GRANTS)
    subprocess.run(
        [
            *("mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={data}"),
            *("--auth-root-authentication-method=normal", "--skip-test-db"),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    paths = (f"--datadir={data}", f"--socket={directory}/database.sock", f"--init-file={grants}")
    address = (f"--bind-address={_LOOPBACK_ADDRESS}", f"--port={_DATABASE_PORT}", "--user=root")
    # Data need not outlive the bed.
    options = ("--innodb-buffer-pool-size=64M", "--innodb-flush-log-at-trx-commit=0")
    configuration = directory / "slurmdbd.conf"
    configuration.touch(mode=0o600)
    configuration.write_text(
        _CONFIGURATION.format(
            directory=directory,
            here=_LOOPBACK_ADDRESS,
            hub=socket.gethostname(),
            port=_ACCOUNTING_PORT,
            database_port=_DATABASE_PORT,
        )
    )
    environment = {
        "SLURM_CONF": str(directory / "slurm.conf"),
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    }
    with (
        _daemon(directory, _DATABASE_PORT, "mariadbd", "--no-defaults", *paths, *address, *options),
        _daemon(directory, _ACCOUNTING_PORT, "slurmdbd", "-D", environment=environment),
    ):
        yield


@contextmanager
def _daemon(
    directory: Path, port: int, *argv: str, environment: Mapping[str, str] | None = None
) -> Iterator[None]:
    log = directory / f"{argv[0]}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            argv, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not _is_listening(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{argv[0]} has not come up:\n{log.read_text()[-2000:]}")
            time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()


def _is_listening(port: int) -> bool:
    try:
        socket.create_connection((_LOOPBACK_ADDRESS, port), 1).close()
    except OSError:
        return False
    return True
