"""Probe of a host's Python environment: package versions, code digests, and replies of project
modules.

The source is sent to the host as text and run with the host's own Python, whatever its version.
So it uses the standard library alone, imports nothing of this project, and is limited to the
syntax of Python 3.7. The launcher imports it too, because both sides must compute the same
digest of the same code. It runs without ``site``, which takes longer than everything else. The
result is cached in a file, see :mod:`.python_environment`.
"""

# Every host pays for each import here, and pathlib is not needed.
# ruff: noqa: PTH100, PTH103, PTH105, PTH108, PTH112, PTH113, PTH116, PTH118, PTH120
# ruff: noqa: PTH122, PTH123, PTH208

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PACKAGES = (
    "torch",
    "megatron_core",
    "numpy",
    "transformers",
    "tokenizers",
    "sentencepiece",
    "einops",
    "triton",
)
MODULE_TIMEOUT_SECONDS = 50
CODE_ROOTS = ("flagscale", os.path.join("third_party", "Megatron-LM"))
CODE_SUFFIXES = (".py", ".json", ".yaml", ".cpp", ".cu", ".h", ".so")
_SKIPPED_DIRECTORIES = ("__pycache__", ".git")


class EnvironmentScan:
    """Installed packages, and the paths that this result depends on.

    ``path_states`` maps each path to its state at the time of the probe, or to "" if it was absent.
    """

    def __init__(self) -> None:
        self.packages: dict[str, str] = {}
        self.path_states: dict[str, str] = {}

    def depend_on(self, path: str) -> bool:
        """Record that the result depends on ``path``, before it is read. Return True if it
        exists."""
        path = os.path.abspath(path)
        if path not in self.path_states:
            try:
                self.path_states[path] = stat_text(os.stat(path))
            except OSError:
                self.path_states[path] = ""
        return bool(self.path_states[path])

    def find_packages(self, directories: list[str]) -> None:
        """Record the versions of :data:`PACKAGES` found in ``directories``.

        Versions come from the names of metadata directories: importing packages would take
        seconds.
        """
        for directory in directories:
            if not directory or not self.depend_on(directory) or not os.path.isdir(directory):
                continue
            for name in os.listdir(directory):
                package, version = parse_metadata_name(name)
                if package in PACKAGES:
                    self.packages.setdefault(package, version)


def parse_metadata_name(name: str) -> tuple[str, str]:
    """Return package and version of a metadata directory, such as ``torch-2.9.0.dist-info``; empty
    texts for other names."""
    stem, ending = os.path.splitext(name)
    package, _, version = stem.partition("-")
    if ending not in (".dist-info", ".egg-info"):
        return "", ""
    return package.lower().replace(".", "_").replace("-", "_"), version.split("-py")[0]


def stat_text(status: os.stat_result) -> str:
    """Return the same text as ``stat -c %u,%a,%d:%i:%s:%.9Y:%.9Z``."""
    text = f"{status.st_dev}:{status.st_ino}:{status.st_size}"
    for nanoseconds in (status.st_mtime_ns, status.st_ctime_ns):
        text += f":{nanoseconds // 10**9}.{nanoseconds % 10**9:09d}"
    return f"{status.st_uid},{status.st_mode & 0o7777:o},{text}"


def package_directories(scan: EnvironmentScan) -> list[str]:
    """Return the directories in which this Python finds packages.

    They are computed as ``site`` does, but without running the code in ``.pth`` files.
    """
    import site

    executable_directory = os.path.dirname(os.path.abspath(sys.executable))
    prefixes, has_user_site = list(site.PREFIXES), True
    for directory in (executable_directory, os.path.dirname(executable_directory)):
        config = os.path.join(directory, "pyvenv.cfg")
        if scan.depend_on(config):
            with open(config, encoding="utf-8", errors="replace") as file:
                words = [line.lower().split() for line in file]
            has_user_site = ["include-system-site-packages", "=", "true"] in words
            prefixes = [os.path.dirname(executable_directory), *(prefixes if has_user_site else [])]
            sys.prefix = prefixes[0]  # without it Debian's site overlooks site-packages there
            break
    site_directories = site.getsitepackages(prefixes)
    if has_user_site and site.check_enableusersite():
        site_directories.insert(0, site.getusersitepackages())
    for prefix in prefixes:
        scan.depend_on(os.path.join(prefix, "conda-meta", "history"))
    return [
        *sys.path,
        *site_directories,
        *(added for path in site_directories for added in _pth_directories(scan, path)),
    ]


def _pth_directories(scan: EnvironmentScan, directory: str) -> list[str]:
    """Return the directories that ``.pth`` files of a directory add."""
    directories = []
    for name in sorted(os.listdir(directory)) if os.path.isdir(directory) else ():
        path = os.path.join(directory, name)
        if name.endswith(".pth") and scan.depend_on(path):
            with open(path, encoding="utf-8", errors="replace") as file:
                lines = [line.strip() for line in file]
            directories += [
                os.path.join(directory, line) for line in lines if line[:7] != "import "
            ]
    return [path for path in directories if os.path.isdir(path) and path != directory]


def build_manifest(project: str) -> dict[str, str]:
    """Return the SHA-256 of every code file below a project directory, by relative path."""
    import hashlib

    digests: dict[str, str] = {}
    for root in CODE_ROOTS:
        for directory, subdirectories, names in os.walk(os.path.join(project, root)):
            subdirectories[:] = sorted(
                name for name in subdirectories if name not in _SKIPPED_DIRECTORIES
            )
            for name in names:
                if name.endswith(CODE_SUFFIXES):
                    path = os.path.join(directory, name)
                    with open(path, "rb") as file:
                        digest = hashlib.sha256(file.read()).hexdigest()
                    digests[os.path.relpath(path, project)] = digest
    return digests


def digest_manifest(manifest: dict[str, str]) -> str:
    """Return a single digest of a manifest; empty for an empty manifest."""
    import hashlib

    lines = "".join(f"{manifest[path]} {path}\n" for path in sorted(manifest))
    return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest() if manifest else ""


def find_interface(address: str) -> str:
    """Return the network interface that this host uses to reach ``address``; "" if there is
    none."""
    import fcntl
    import socket
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
            local_address = probe.getsockname()[0]
        except OSError:
            return ""
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                reply = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
            except OSError:
                continue
            if socket.inet_ntoa(reply[20:24]) == local_address:
                return name
    return ""


def inspect_environment(
    project: str, compare_code: str, python: str, cache: str, key: str
) -> list[str]:
    """Return the lines that describe this Python environment, and write them to the cache.

    ``python`` is the command that started this interpreter. ``compare_code`` is not empty if
    code is to be digested. ``cache`` is the path of the cache file, empty for none, and ``key``
    its first line.
    """
    scan = EnvironmentScan()
    for path in (_find_program(python), sys.executable):
        scan.depend_on(path)
    scan.find_packages(package_directories(scan))
    if "torch" not in scan.packages:
        # torch is installed in a way that needs site, such as an import hook, or not at all.
        import site

        site.main()
        scan.find_packages(sys.path)
    version = ".".join(map(str, sys.version_info[:3]))
    lines = [_format_line("version", version), _format_line("executable", sys.executable)]
    lines += [
        _format_line("package " + name, scan.packages[name]) for name in sorted(scan.packages)
    ]
    if compare_code:
        lines.append(_format_line("code", digest_manifest(build_manifest(project))))
    if cache:
        states = [
            f"stat {state} {path}" if state else f"absent {path}"
            for path, state in sorted(scan.path_states.items())
        ]
        write_cache(cache, [key, *states, *lines, "end"])
    return lines


def _format_line(name: str, value: str) -> str:
    value = value.replace("%", "%25").replace("\n", "%0A")
    return f"= {name} {value}"


def _find_program(name: str) -> str:
    """Return the file that a shell runs for the command ``name``."""
    if "/" in name:
        return name
    directories = os.environ.get("PATH", "").split(os.pathsep)
    candidates = [os.path.join(directory, name) for directory in directories]
    return next((path for path in candidates if os.access(path, os.X_OK)), name)


def write_cache(path: str, lines: list[str]) -> None:
    """Write a file atomically, readable by this user only.

    Failure to write is ignored: the next probe runs again.
    """
    directory = os.path.dirname(path)
    temporary = f"{path}.{os.getpid()}"
    if any("\n" in line for line in lines):
        return
    try:
        os.makedirs(directory, 0o700, exist_ok=True)
        status = os.lstat(directory)
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            return
        try:
            with open(
                os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb"
            ) as file:
                file.write(os.fsencode("".join(line + "\n" for line in lines)))
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
    except OSError:
        pass


def run_queries(*queries: str) -> list[str]:
    """Run the modules of all queries and return a line with the name and the reply of each, as
    JSON.
    """
    import json

    lines = []
    for query in map(json.loads, queries):
        # Where the project has not been copied yet, there is no module to run.
        if os.path.isfile(os.path.join(query["project"], "flagscale", "launcher", "agent.py")):
            reply = [query["name"], run_module(query, [sys.executable])]
            lines.append(_format_line("answer", json.dumps(reply)))
    return lines


def run_module(query: dict[str, Any], python: list[str]) -> dict[str, Any]:
    """Run a module of the project with ``python`` in the environment of the ranks and return its
    reply.

    The reply is one line of JSON. If the module fails, it is ``{"problem": reason}``.
    """
    import json
    import subprocess

    rank_variables = {
        name: fill_references(parts, os.environ) for name, parts in query["environment"].items()
    }
    path = [query["project"], rank_variables.get("PYTHONPATH") or os.environ.get("PYTHONPATH", "")]
    environment = dict(os.environ, **rank_variables)
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in path if entry)
    try:
        process = subprocess.run(
            [*python, "-m", query["module"], *query["words"]],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=MODULE_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"its Python gives no answer within {MODULE_TIMEOUT_SECONDS} s"}
    lines = (process.stdout if process.returncode == 0 else process.stderr).strip().splitlines()
    if process.returncode == 0 and lines:
        return json.loads(lines[-1])  # type: ignore[no-any-return]
    return {"problem": lines[-1] if lines else "its Python does not answer"}


def fill_references(parts: list[Any], environment: Any) -> str:
    """Join a value that :func:`flagscale.config.interpolation.split_references` has split, with
    references replaced by the variables of ``environment``.
    """
    text = ""
    for part in parts:
        if isinstance(part, str):
            text += part
        elif environment.get(part[1]):
            text += part[0] + environment[part[1]] + part[2]
    return text


def main() -> None:
    """Run the action that the first argument names, and print its result."""
    action, arguments = sys.argv[1], sys.argv[2:]
    if action == "inspect":
        text = "\n".join(inspect_environment(*arguments))
    elif action == "query":
        text = "\n".join(run_queries(*arguments))
    elif action == "manifest":
        import json

        text = json.dumps(build_manifest(*arguments))
    else:
        text = find_interface(*arguments)
    sys.stdout.buffer.write(os.fsencode(text + "\n"))


if __name__ == "__main__":
    main()
