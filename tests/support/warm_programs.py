"""Programs that start without their imports: training, and the launcher's command line.

The imports of torch and megatron.core take longer than a tiny training run, and those of the
launcher as long as most of its actions. So one process per test session imports them and forks
each program, with its own arguments, environment, working directory and output:
:func:`start_warm_program` and :func:`run_command_line`. Everything after the imports is that of a
new process, including its exit. This module is also the program of that process.
"""

from __future__ import annotations

import array
import atexit
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

from flagscale.free_port import free_port

ROOT = Path(__file__).parents[2]
TRAINING, LAUNCHER = "training", "launcher"
"""Kinds of programs, by what is imported."""
_LAUNCHER_MODULES = (
    "flagscale.cli",
    "flagscale.accelerators.cpu",
    "flagscale.accelerators.cuda",
    "flagscale.config.train_reader",
    "flagscale.hosts.local",
    *(
        f"flagscale.launcher.{name}"
        for name in ("actions", "entry", "listing", "plan_builder", "preflight.hosts", "preview",
                     "runners.hosts", "show.plan", "show.view", "start")
    ),
)  # fmt: skip
"""Modules that actions import, directly or through others."""
_NAMESPACES = ("mnt", "net")
_MAX_REQUEST = 1 << 20
_STACKS_AFTER = 0.95
"""Part of its timeout after which a program writes the stacks of its threads."""


class WarmProgram:
    """Ranks forked from the process with the imports, with the interface of ``Popen``.

    Attributes:
        returncode: 0, or the exit code of the first rank that failed; None while a rank runs.
    """

    def __init__(self, reports: Sequence[IO[str]], outputs: Sequence[IO[bytes]]) -> None:
        self.returncode: int | None = None
        self._reports, self._outputs = list(reports), outputs
        self._exit_codes: list[int] = []

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (timeout or 0.0)
        while self._reports:
            remaining = None if timeout is None else max(deadline - time.monotonic(), 0.0)
            if not select.select(self._reports[:1], [], [], remaining)[0]:
                raise subprocess.TimeoutExpired("warm program", timeout or 0.0)
            with self._reports.pop(0) as report:
                self._exit_codes.append(int(report.readline()))
        if self.returncode is None:
            self.returncode = next(filter(None, self._exit_codes), 0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end and return standard output and standard error.

        If the program does not end in time, what it has written is printed, for pytest's report.
        """
        try:
            self.wait(timeout)
        except subprocess.TimeoutExpired:
            print(*self._read_outputs(), sep="\n", file=sys.stderr)
            raise
        output, errors = self._read_outputs()
        return output, errors

    def _read_outputs(self) -> list[str]:
        """Return standard output and standard error, and close them."""
        texts = []
        for output in self._outputs:
            output.seek(0)
            texts.append(output.read().decode())
            output.close()
        return texts


def start_warm_program(
    program: Path,
    arguments: Sequence[str],
    *,
    ranks: int = 1,
    environment: Mapping[str, str],
    cwd: Path,
    timeout: float | None = None,
) -> WarmProgram:
    """Start a Python program that uses torch and megatron.core on a CPU.

    With several ranks, each has the variables that torchrun would set. If a rank runs for longer
    than ``timeout`` seconds, it writes the stacks of its threads to standard error.
    """
    outputs = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115 - closed by communicate
    reports = []
    port = free_port()
    for rank in range(ranks):
        rank_variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        variables = {**environment, **(rank_variables if ranks > 1 else {})}
        argv = [str(program), *arguments]
        reports.append(_fork(TRAINING, argv, variables, cwd, outputs, timeout=timeout))
    return WarmProgram(reports, outputs)


def run_warm_program(
    program: Path,
    arguments: Sequence[str],
    *,
    ranks: int = 1,
    environment: Mapping[str, str],
    cwd: Path,
    timeout: float = 180.0,
) -> subprocess.CompletedProcess[str]:
    """Run a program as :func:`start_warm_program` starts it."""
    process = start_warm_program(
        program, arguments, ranks=ranks, environment=environment, cwd=cwd, timeout=timeout
    )
    output, errors = process.communicate(timeout)
    return subprocess.CompletedProcess([str(program)], process.wait(), output, errors)


def run_command_line(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    cwd: Path,
    timeout: float,
    owner: tuple[int, int] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command line of the launcher, ``PYTHON run.py …`` or ``PYTHON -m flagscale.cli …``.

    It runs to its end, with its output in temporary files and without input. ``owner`` is the user
    and group id of another user. A new interpreter runs it if variables of Python differ, such as
    PYTHONPATH.
    """
    executable, *argv = command
    if executable != sys.executable or _python_variables(environment) != _PYTHON_VARIABLES:
        user, group = owner or (None, None)
        return subprocess.run(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
            user=user,
            group=group,
            extra_groups=None if owner is None else (),
        )
    outputs = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115 - closed by communicate
    report = _fork(LAUNCHER, argv, environment, cwd, outputs, owner=owner, timeout=timeout)
    process = WarmProgram([report], outputs)
    output, errors = process.communicate(timeout)
    return subprocess.CompletedProcess(command, process.wait(), output, errors)


def _python_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a Python interpreter reads when it starts."""
    return {name: value for name, value in environment.items() if name.startswith("PYTHON")}


_PYTHON_VARIABLES = _python_variables(os.environ)


def _fork(
    kind: str,
    argv: Sequence[str],
    environment: Mapping[str, str],
    cwd: Path,
    outputs: Sequence[IO[bytes]],
    *,
    owner: tuple[int, int] | None = None,
    timeout: float | None = None,
) -> IO[str]:
    """Request a program, and return a stream with its exit code once it has ended.

    The program is in the namespaces of this thread, which may be those of a test bed.
    """
    request = {
        "argv": list(argv),
        "environment": dict(environment),
        "cwd": str(cwd),
        "owner": owner,
        "timeout": timeout,
    }
    read_end, write_end = os.pipe()
    namespaces = [
        os.open(f"/proc/thread-self/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in _NAMESPACES
    ]
    output_descriptors = [output.fileno() for output in outputs]
    descriptors = array.array("i", [write_end, *output_descriptors, *namespaces])
    _start_server(kind).sendmsg(
        [json.dumps(request).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
    )
    for descriptor in (write_end, *namespaces):
        os.close(descriptor)
    return os.fdopen(read_end)


@cache
def _start_server(kind: str) -> socket.socket:
    """Start the process with the imports, which ends with this one, and return its connection."""
    connection, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_REQUEST)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if kind == TRAINING:
        environment |= {
            "PYTHONPATH": f"{ROOT}:{ROOT / 'third_party' / 'Megatron-LM'}",
            "OMP_NUM_THREADS": "1",
            "FLAGSCALE_DEVICE": "cpu",
        }
    server = subprocess.Popen(
        [sys.executable, __file__, kind, str(server_end.fileno())],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[server_end.fileno()],
    )
    server_end.close()

    def stop() -> None:
        connection.close()
        server.wait()

    atexit.register(stop)
    return connection


class _Server:
    """Forks the requested programs and reports their exit codes."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)
        self._reports: dict[int, tuple[int, int]] = {}  # of each pidfd: pid, descriptor

    def serve(self) -> dict[str, Any] | None:
        """Return the request in a forked program, or None in the server after the last one."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._connection:
                    self._report_exit(key.fd)
                    continue
                message, descriptors, _, _ = socket.recv_fds(
                    self._connection, _MAX_REQUEST, 3 + len(_NAMESPACES)
                )
                if not message:
                    self._kill_programs()
                    return None
                pid = os.fork()
                if pid == 0:
                    self._become_program(descriptors)
                    return json.loads(message)
                self._add_program(pid, descriptors)

    def _add_program(self, pid: int, descriptors: list[int]) -> None:
        report, *others = descriptors
        for descriptor in others:
            os.close(descriptor)
        pidfd = os.pidfd_open(pid)
        self._reports[pidfd] = pid, report
        self._selector.register(pidfd, selectors.EVENT_READ)

    def _report_exit(self, pidfd: int) -> None:
        pid, report = self._reports.pop(pidfd)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        with suppress(BrokenPipeError):  # the test does not wait for it
            os.write(report, f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os.close(report)

    def _kill_programs(self) -> None:
        for pid, _ in self._reports.values():
            os.kill(pid, signal.SIGKILL)

    def _become_program(self, descriptors: list[int]) -> None:
        _, output, errors, *namespaces = descriptors
        os.dup2(output, 1)
        os.dup2(errors, 2)
        for namespace, name in zip(namespaces, _NAMESPACES, strict=True):
            _enter_namespace(namespace, name)
        for descriptor in (*descriptors, *self._reports):
            os.close(descriptor)
        for _, other_report in self._reports.values():
            os.close(other_report)
        self._selector.close()
        self._connection.close()


def _enter_namespace(descriptor: int, name: str) -> None:
    """Move this process into a namespace, unless it is there already."""
    own = Path("/proc/self/ns", name).stat()
    if os.fstat(descriptor).st_ino != own.st_ino and ctypes.CDLL(None).setns(descriptor, 0) != 0:
        raise RuntimeError(f"the {name} namespace of the test cannot be entered")


def _import_modules(kind: str) -> None:
    """Import what a program of this kind imports by itself."""
    if kind == TRAINING:
        from flagscale.train.device import choose_device

        choose_device("cpu", 0)  # before megatron.core, which would import torch's compiler
        import torch.utils.tensorboard  # noqa: F401

        import flagscale.train.setup  # noqa: F401

        return
    for name in _LAUNCHER_MODULES:
        importlib.import_module(name)
    assert "torch" not in sys.modules, "the launcher runs without torch"


def _run(argv: list[str]) -> None:
    """Run a program in this process, as ``python`` with these arguments does."""
    if argv[0] == "-m":
        module = argv[1]
        sys.argv, sys.path[0] = argv[1:], str(Path.cwd())
        # It is run, not imported.
        sys.modules.pop(module, None)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = argv, str(Path(argv[0]).parent)
        runpy.run_path(argv[0], run_name="__main__")


def main() -> None:
    kind, descriptor = sys.argv[1:]
    server = _Server(socket.socket(fileno=int(descriptor)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _import_modules(kind)
    # A garbage collection would write to all imported objects and copy every page of them.
    gc.collect()
    gc.freeze()
    request = server.serve()
    if request is None:
        return
    if request["owner"] is not None:
        user, group = request["owner"]
        os.setgroups([])
        os.setgid(group)
        os.setuid(user)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    time.tzset()
    if request["timeout"] is not None:
        faulthandler.dump_traceback_later(request["timeout"] * _STACKS_AFTER)
    _run(request["argv"])


if __name__ == "__main__":
    main()
