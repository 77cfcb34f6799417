"""Record of what a run used on a host: software, devices, code, data and tokenizer.

The agent of each host starts this module as a process of the lowest priority once the ranks are
being started, so that a start does not wait for it. It appends lines of JSON to ``host.jsonl`` next
to the ranks' events, which therefore belongs to one start of the run, and reaches the launching
machine with them. Checksums of data come last, and only from host 0.

Standard library alone, and no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flagscale.files import PRIVATE_FILE_MODE
from flagscale.hosts.kernel import signal_on_parent_death
from flagscale.launcher.layout import HOST_RECORD_FILE
from flagscale.launcher.liveness.agent_log import log_line
from flagscale.module_command import PROJECT, python_arguments
from flagscale.records import from_record
from flagscale.status import RUN_ID_VARIABLE

IMAGE_VARIABLE = "FLAGSCALE_CONTAINER_IMAGE"
"""Environment variable in which a user names the container's image, where nothing else does."""
_IMAGE_VARIABLES = (IMAGE_VARIABLE, "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER")
_MAX_HASHED_BYTES = 64 << 30
"""Bytes of data that are read for checksums; files beyond have a size only."""
_READ_BYTES = 1 << 20
_LIBRARY_PREFIXES = (
    *("ASCEND_", "CUBLAS", "CUDA_", "CUDNN_", "FI_", "FSCCL_", "GLOO_", "HCCL_", "HIP_", "HSA_"),
    *("MKL_", "MUSA_", "NCCL_", "NVTE_", "OMP_", "OMPI_MCA_", "PYTORCH_", "RCCL_", "TORCH"),
    *("TRITON_", "UCC_", "UCX_"),
)
"""Beginnings of the names of variables that steer libraries."""
_LAUNCHER_PREFIXES = ("TORCHELASTIC_", "TORCH_ELASTIC_")
_MAX_VALUE_CHARACTERS = 1000
_LOWEST_PRIORITY = 19
_TORCH_VERSION = re.compile(
    r"^(cuda|hip|git_version)\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", re.MULTILINE
)


@dataclass(frozen=True)
class HostRecord:
    """Software and hardware of a host. Empty values are unknown.

    ``packages`` are those of the Python that starts the ranks, ``torch`` its build (``cuda``,
    ``hip``, ``git_version``), ``drivers`` the versions by kind of device, and ``devices`` the
    numbers of devices by product. ``environment`` has the variables that steer libraries, without
    secrets, and ``code`` digests of this project and of the adapted backend.
    """

    host: str = ""
    os: str = ""
    kernel: str = ""
    cpu: str = ""
    cpus: int = 0
    memory_gib: float = 0.0
    devices: Mapping[str, int] = field(default_factory=dict)
    drivers: Mapping[str, str] = field(default_factory=dict)
    container: str = ""
    python: str = ""
    executable: str = ""
    torch: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    code: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class FileRecord:
    """File that a run reads, by the argument that names it. ``sha256`` is empty if it was not
    computed. A tokenizer's directory is one entry, whose digest is that of its files.
    """

    argument: str
    path: str
    size: int
    sha256: str = ""


@dataclass(frozen=True)
class InputRecord:
    """Files that a run reads on a host.

    ``mixtures`` are the words of each blend, ``sizes`` a digest of the sizes of all files, by which
    hosts are compared. Only host 0 has ``files``.
    """

    mixtures: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sizes: str = ""
    files: tuple[FileRecord, ...] = ()


# -- writing ---------------------------------------------------------------------------------------


class HostRecorder:
    """Starts the process that writes a host's record, for the agent."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, directory: Path, node_rank: int, command: Sequence[str]) -> None:
        """Start recording to the status directory. ``command`` is what the agent runs."""
        # Without the run's id it is no process of the run, whose attempts may end before it.
        environment = {k: v for k, v in os.environ.items() if k != RUN_ID_VARIABLE}
        words = [str(directory / HOST_RECORD_FILE), str(node_rank), *command]
        try:
            self._process = subprocess.Popen(
                [sys.executable, *python_arguments(__name__), *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # what it cannot read is no matter of the run's log
                env=environment,
                start_new_session=True,
                preexec_fn=signal_on_parent_death(os.getpid(), signal.SIGKILL),  # noqa: PLW1509 - one thread
            )
        except OSError as error:
            log_line(f"cannot record the software of this host: {error.strerror}")

    @property
    def pids(self) -> Collection[int]:
        """Pid of the process while it runs."""
        return () if self._process is None else (self._process.pid,)

    def record_exit(self, pid: int, status: int) -> None:
        """Record the exit of a child process, if it is this one."""
        if self._process is not None and pid == self._process.pid:
            self._process.returncode = os.waitstatus_to_exitcode(status)
            self._process = None

    def stop(self) -> None:
        """End the process, whatever it has recorded."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)


def main() -> int:
    """Write the record of this host: ``FILE NODE_RANK COMMAND …``."""
    file, node_rank, *command = sys.argv[1:]
    with suppress(OSError):
        os.nice(_LOWEST_PRIORITY)
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE_FILE_MODE)
    except OSError:
        return 1  # such as a full disk, which others report
    with os.fdopen(descriptor, "wb", buffering=0) as output:
        for kind, record in _iter_records(command, with_checksums=node_rank == "0"):
            line = json.dumps({"kind": kind, **record}).encode() + b"\n"
            try:
                output.write(line)
            except OSError:
                return 1
    return 0


def _iter_records(
    command: Sequence[str], *, with_checksums: bool
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield kind and fields of the parts of a record, fast ones first."""
    yield "host", asdict(_read_host())
    blends, paths = find_inputs(command)
    sizes = {path: size for path in paths if (size := _read_size(Path(path))) is not None}
    yield "inputs", {"mixtures": blends, "sizes": _digest_text(json.dumps(sizes))}
    yield "code", {"code": _digest_code()}
    if not with_checksums:
        return
    budget = _MAX_HASHED_BYTES
    for path, size in sizes.items():
        digest = ""
        if not path.endswith(".bin") and size <= budget:
            budget -= size
            digest = _digest_path(Path(path))
        yield "file", asdict(FileRecord(paths[path], path, size, digest))


def find_inputs(command: Sequence[str]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return the blends of a command line by argument, and the files and directories that it reads,
    with the argument of each.
    """
    from flagscale.config.arguments.spec.paths import (
        BLENDS,
        CHAT_TEMPLATE,
        DATA_PHASES,
        EVAL_PROMPTS,
        EVAL_TASKS,
        TOKENIZER_PATHS,
        files_needed,
    )

    values: dict[str, list[str]] = {}
    name = ""
    for word in command:
        if word.startswith("--"):
            flag, equals, value = word[2:].partition("=")
            name = flag.replace("-", "_")
            values[name] = [value] if equals else []
        elif name:
            values[name].append(word)
    blends = {n: words for n, words in values.items() if n in BLENDS or n == DATA_PHASES}
    read = (*BLENDS, DATA_PHASES, *TOKENIZER_PATHS, CHAT_TEMPLATE, EVAL_PROMPTS, EVAL_TASKS)
    paths = {
        path: argument
        for argument in read
        if (words := values.get(argument))
        for path in files_needed(argument, words if len(words) > 1 else words[0])
    }
    return {n: list(words) for n, words in blends.items()}, paths


def _read_size(path: Path) -> int | None:
    """Return the size of a file, or of a tokenizer's files; None if it does not exist."""
    with suppress(OSError):
        return sum(file.stat().st_size for file in _list_files(path))
    return None


def _list_files(path: Path) -> list[Path]:
    """Return the file, or the files of a tokenizer's directory."""
    if not path.is_dir():
        return [path]
    from flagscale.tokenizer_files import TEMPLATE_FILE, find_vocabulary_files

    settings = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    named = (path / name for name in (*settings, TEMPLATE_FILE))
    return [*find_vocabulary_files(path), *(file for file in named if file.is_file())]


def _digest_path(path: Path) -> str:
    """Return the SHA-256 of a file, or of the names and digests of a tokenizer's files; empty if it
    cannot be read.
    """
    try:
        if not path.is_dir():
            return _digest_file(path)
        return _digest_text("".join(f"{_digest_file(f)} {f.name}\n" for f in _list_files(path)))
    except OSError:
        return ""


def _digest_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _digest_text(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def _digest_code() -> dict[str, str]:
    """Return the digests of this project's package and of the adapted backend."""
    from flagscale.hosts import probe

    manifest = probe.build_manifest(str(PROJECT))
    digests = {}
    for root in probe.CODE_ROOTS:
        files = {p: digest for p, digest in manifest.items() if p.startswith(root + os.sep)}
        if files:
            digests[Path(root).name] = probe.digest_manifest(files)
    return digests


def _read_host() -> HostRecord:
    from flagscale.accelerators.registry import list_device_accelerators

    packages, torch_directory = _find_packages()
    drivers, devices = {}, Counter[str]()
    for adapter in list_device_accelerators():
        products = adapter.list_products()
        devices.update(products)
        if products and (version := adapter.driver_version()):
            drivers[adapter.name] = version
    kernel = os.uname()
    return HostRecord(
        host=kernel.nodename,
        os=_read_field("/etc/os-release", r'^PRETTY_NAME="?([^"\n]*)'),
        kernel=kernel.release,
        cpu=_read_field("/proc/cpuinfo", r"^(?:model name|CPU part|cpu)\s*:\s*(.*)"),
        cpus=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        devices=dict(devices),
        drivers=drivers,
        container=_find_container(),
        python=".".join(map(str, sys.version_info[:3])),
        executable=sys.executable,
        torch=_read_torch_build(torch_directory),
        packages=packages,
        environment=dict(_iter_library_variables(os.environ)),
    )


def _iter_library_variables(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the variables that steer libraries of training and communication, by name."""
    from flagscale.config.secrets import is_secret

    for name, value in sorted(environment.items()):
        is_wanted = name.startswith(_LIBRARY_PREFIXES) and not name.startswith(_LAUNCHER_PREFIXES)
        if is_wanted and not is_secret(name, value):
            yield name, value[:_MAX_VALUE_CHARACTERS]


def _read_field(path: str, pattern: str) -> str:
    """Return the first group of the first match in a file; empty without one."""
    with suppress(OSError):
        text = Path(path).read_text(encoding="utf-8", errors="replace")
        if match := re.search(pattern, text, re.MULTILINE):
            return match[1].strip()
    return ""


def _find_container() -> str:
    """Return the image of the container that this process is in, or its kind; empty outside."""
    for name in _IMAGE_VARIABLES:
        if image := os.environ.get(name):
            return image
    if image := _read_field("/run/.containerenv", r'^image="([^"\n]+)"'):
        return image
    if build := os.environ.get("NVIDIA_PYTORCH_VERSION"):
        return f"NVIDIA PyTorch {build}"
    kinds = (("/.dockerenv", "docker"), ("/run/.containerenv", "podman"))
    found = next((kind for path, kind in kinds if Path(path).exists()), "")
    return found or ("kubernetes" if "KUBERNETES_SERVICE_HOST" in os.environ else "")


def _find_packages() -> tuple[dict[str, str], str]:
    """Return the installed packages with their versions, and the directory that has torch.

    They come from the names of metadata directories, as in :mod:`flagscale.hosts.probe`.
    """
    from flagscale.hosts.probe import parse_metadata_name

    packages: dict[str, str] = {}
    torch_directory = ""
    for directory in sys.path:
        names: list[str] = []
        with suppress(OSError):
            names = os.listdir(directory or ".")  # noqa: PTH208 - entries of sys.path are text
        for name in sorted(names):
            package, version = parse_metadata_name(name)
            package = package.replace("_", "-")
            if package and package not in packages:
                packages[package] = version
                if package == "torch":
                    torch_directory = directory
    return dict(sorted(packages.items())), torch_directory


def _read_torch_build(directory: str) -> dict[str, str]:
    """Return the versions that torch was built with, without importing it."""
    if not directory:
        return {}
    with suppress(OSError):
        text = Path(directory, "torch", "version.py").read_text(encoding="utf-8")
        return dict(_TORCH_VERSION.findall(text))
    return {}


# -- reading ---------------------------------------------------------------------------------------


def read_host_record(directory: Path) -> tuple[HostRecord | None, InputRecord]:
    """Return the record in a status directory, as far as it was written; None without any."""
    host, inputs, files = None, InputRecord(), []
    try:
        lines = (directory / HOST_RECORD_FILE).read_bytes().splitlines()
    except OSError:
        return None, inputs
    fields: dict[str, Any] = {}
    for line in lines:
        with suppress(ValueError, RecursionError):
            record = json.loads(line)
            kind = record.pop("kind", "") if isinstance(record, dict) else ""
            if kind in ("host", "code"):
                fields |= record
            elif kind == "inputs":
                parsed = from_record(InputRecord, {"files": [], **record})
                inputs = parsed or inputs
            elif kind == "file" and (file := from_record(FileRecord, record)) is not None:
                files.append(file)
    if fields:
        host = from_record(HostRecord, {**asdict(HostRecord()), **fields})
    return host, InputRecord(inputs.mixtures, inputs.sizes, tuple(files))


if __name__ == "__main__":
    sys.exit(main())
