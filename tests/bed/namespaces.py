"""Moving this thread into its own namespaces, and back.

Namespaces belong to threads. The calling thread, threads that it starts afterwards and all
processes that they start are in the bed's network; the rest of the test process is not affected.
This lets ``python -m pytest``, with or without xdist, use a bed for one test and then continue.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

CLONE_FS = 0x00000200
CLONE_NEWNS = 0x00020000
CLONE_NEWNET = 0x40000000

PROGRAMS = ("ssh", "sshd", "ip", "tc", "nft", "unshare", "nsenter", "setpriv", "mount", "faketime")

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: int) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


@functools.cache
def explain_no_bed() -> str | None:
    """Return why a bed cannot be built on this machine; None if it can."""
    if os.geteuid() != 0:
        return "needs root"
    missing_programs = [name for name in PROGRAMS if shutil.which(name, path=search_path()) is None]
    if missing_programs:
        return f"no {', '.join(missing_programs)} on this machine (make system)"
    options = ("--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc")
    # sshd drops root privileges before it reads network data, so changing the user must work.
    as_other_user = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "true")
    result = subprocess.run(
        ["unshare", *options, *as_other_user], capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        return f"this machine allows no namespaces: {result.stderr.strip()}"
    return None


def search_path() -> str:
    """Return PATH with the system directories, which an ordinary user's PATH lacks."""
    return os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))


@contextmanager
def fresh_network() -> Iterator[None]:
    """Give this thread an empty network and private mounts within the block."""
    network = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    mounts = os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    directory = os.open(".", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _call("unshare", CLONE_NEWNET | CLONE_NEWNS)
        try:
            subprocess.run(["mount", "--make-rprivate", "/"], check=True)
            yield
        finally:
            # Threads that outlive the block share this thread's root and working directory. The
            # kernel changes the mount namespace only of a thread that does not share them.
            _call("unshare", CLONE_FS)
            _call("setns", mounts, CLONE_NEWNS)
            _call("setns", network, CLONE_NEWNET)
            os.fchdir(directory)
    finally:
        for descriptor in (network, mounts, directory):
            os.close(descriptor)
