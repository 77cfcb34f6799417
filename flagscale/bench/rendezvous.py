"""Rendezvous of a benchmark's ranks: a torch store (:class:`torch.distributed.Store`) that all
reach.

How they find it depends on the launcher of the ranks (:mod:`.world`): by its address and port, by
MPI's process manager, or by a file on a single host.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from flagscale.bench.world import BenchWorld
from flagscale.errors import ConfigError, UnreachableError

_POLL_SECONDS = 0.02
_ENDPOINT_KEY = "flagscale_bench"
_LEFT_COUNT_KEY = "left"


def rendezvous(
    world: BenchWorld, timeout_seconds: float, address: str | None = None, port: int | None = None
) -> Store:
    """Return a store shared by all ranks of ``world``. ``address`` and ``port`` of rank 0 override
    the launcher's.

    Raises:
        UnreachableError: the ranks did not meet within ``timeout_seconds``.
        ConfigError: the address of rank 0 is unknown.
    """
    timeout = timedelta(seconds=timeout_seconds)
    try:
        if world.launcher == "torchrun":
            store: Store = next(iter(torch_rendezvous("env://", timeout=timeout)))[0]
            return store
        host = address or world.address
        if host and (port or world.port):
            return _connect_store(host, port or world.port or 0, world, timeout)
        if world.launcher == "MPICH":
            return _rendezvous_by_pmi(world, address, port, timeout)
        if world.rendezvous:
            return _rendezvous_by_file(
                world, _rendezvous_file(world), address or "127.0.0.1", port or 0, timeout
            )
    except (dist.DistError, RuntimeError, OSError) as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnreachableError(
            f"rank {world.rank} could not meet the others: {first_line}"
        ) from error
    raise ConfigError(
        f"{world.launcher}: the ranks are on several hosts and nothing tells where rank 0 is",
        hint="export MASTER_ADDR and MASTER_PORT to every rank (mpirun -x MASTER_ADDR=... )",
    )


def _connect_store(host: str, port: int, world: BenchWorld, timeout: timedelta) -> TCPStore:
    """Connect to a TCPStore, without waiting for other ranks: readers wait for the keys they
    need.
    """
    is_master = world.rank == 0
    return TCPStore(host, port, world.size, is_master, timeout, wait_for_workers=False)


def _rendezvous_by_pmi(
    world: BenchWorld, address: str | None, port: int | None, timeout: timedelta
) -> Store:
    """Rendezvous under MPICH's mpirun by PMI-1, without an MPI library.

    Hydra gives every rank a socket (``PMI_FD``) for lines of ``key=value`` words: put a pair,
    wait for all ranks, get another rank's pair. It works between hosts and needs no shared disk.
    """
    store = None
    with os.fdopen(os.dup(int(os.environ["PMI_FD"])), "r+b", buffering=0) as stream:
        request = partial(_ask_pmi, stream)
        request("init pmi_version=1 pmi_subversion=1", "response_to_init")
        kvs_name = request("get_my_kvsname", "my_kvsname").get("kvsname", "")
        if world.rank == 0:
            host = address or ("127.0.0.1" if world.one_host else socket.gethostname())
            store = _connect_store(host, port or 0, world, timeout)
            request(
                f"put kvsname={kvs_name} key={_ENDPOINT_KEY} value={host}/{store.port}",
                "put_result",
            )
        request("barrier_in", "barrier_out")
        endpoint = request(f"get kvsname={kvs_name} key={_ENDPOINT_KEY}", "get_result")["value"]
        # A rank that exits after init without finalize counts as failed.
        request("finalize", "finalize_ack")
    host_name, _, port_text = endpoint.rpartition("/")
    return store or _connect_store(host_name, int(port_text), world, timeout)


def _ask_pmi(stream: IO[bytes], request: str, expected: str) -> Mapping[str, str]:
    """Send a request, and return the words of the launcher's answer.

    Raises:
        UnreachableError: the answer does not follow PMI-1.
    """
    try:
        stream.write(f"cmd={request}\n".encode())
        line = stream.readline().decode(errors="replace").strip()
    except OSError as error:
        raise UnreachableError(f"mpirun does not answer on PMI_FD: {error}") from error
    words = dict(word.partition("=")[::2] for word in line.split() if "=" in word)
    if words.get("cmd") != expected or words.get("rc", "0") != "0":
        command = request.partition(" ")[0]
        raise UnreachableError(f"mpirun answered {line!r} to {command!r} over PMI")
    return words


def _rendezvous_file(world: BenchWorld) -> Path:
    """Return a path that no other user can write, so that nobody can redirect the ranks."""
    name = Path(world.rendezvous or "")
    if name.is_absolute():
        return name
    directory = Path(tempfile.gettempdir()) / f"flagscale-bench-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    if directory.stat().st_uid != os.getuid():
        raise UnreachableError(f"{directory} belongs to another user")
    return directory / name


def _rendezvous_by_file(
    world: BenchWorld, path: Path, host: str, port: int, timeout: timedelta
) -> Store:
    file_store = FileStore(str(path))
    if world.rank == 0:
        store = _connect_store(host, port, world, timeout)
        file_store.set(_ENDPOINT_KEY, str(store.port))
        return store
    try:
        file_store.wait([_ENDPOINT_KEY], timeout)
    except RuntimeError as error:
        raise UnreachableError(f"rank {world.rank} waited for rank 0 in vain") from error
    return _connect_store(host, int(file_store.get(_ENDPOINT_KEY)), world, timeout)


def init_default_group(store: Store, world: BenchWorld, backend: str, **arguments: Any) -> None:
    """Create torch's default group of ``world``. ``arguments`` are further arguments of
    ``init_process_group``.
    """
    arguments |= {"rank": world.rank, "world_size": world.size}
    dist.init_process_group(backend, store=store, **arguments)


def barrier(store: Store, world: BenchWorld, name: str, timeout: timedelta) -> None:
    """Wait for all ranks through the store. A collective instead would initialize communication
    that is to be measured. ``name`` must be unique in the store.
    """
    if store.add(f"here/{name}", 1) == world.size:
        store.set(f"all/{name}", "1")
    store.wait([f"all/{name}"], timeout)


def remove_files(world: BenchWorld) -> None:
    """Remove the files of the rendezvous. Call on rank 0 once all ranks have met."""
    if world.rank == 0 and world.rendezvous:
        file = _rendezvous_file(world)
        file.unlink(missing_ok=True)
        if world.launcher == "local":
            # The process that created this directory may be killed before it removes it.
            with suppress(OSError):
                file.parent.rmdir()


def leave_store(store: Store, world: BenchWorld, timeout_seconds: float) -> None:
    """Wait until this rank may disconnect from the store. Rank 0 hosts the store, and waits until
    the other ranks have called this, at most ``timeout_seconds``.
    """
    if world.rank:
        # The store may be closed before its reply arrives, but it has received the message.
        with suppress(dist.DistError, RuntimeError):
            store.add(_LEFT_COUNT_KEY, 1)
        return
    deadline = time.monotonic() + timeout_seconds
    while store.add(_LEFT_COUNT_KEY, 0) < world.size - 1 and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
