"""Looks at a host's Python world: versions, code, space, paths. Standard library alone.

Travels to the host as text and runs there with the host's own Python, whatever its version, so
it imports nothing of this project and stays with what Python 3.7 understands. The launcher
imports it too: both sides must take the same digest of the same code.
"""

# Every host pays for what is imported here, and pathlib is not needed.
# ruff: noqa: PTH110, PTH112, PTH113, PTH118, PTH120, PTH122, PTH123, PTH208

from __future__ import annotations

import json
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
BACKEND_SECONDS = 50
CODE_ROOTS = ("flagscale", os.path.join("third_party", "Megatron-LM"))
CODE_ENDINGS = (".py", ".json", ".yaml", ".cpp", ".cu", ".h", ".so")
_NOT_CODE = ("__pycache__", ".git")


def packages() -> dict[str, str]:
    """The versions of the packages that matter, from the names of their metadata directories:
    importing them would take seconds."""
    found: dict[str, str] = {}
    for directory in sys.path:
        try:
            names = os.listdir(directory or ".")
        except OSError:
            continue
        for name in names:
            stem, ending = os.path.splitext(name)
            package, _, version = stem.partition("-")
            package = package.lower().replace(".", "_")
            if ending in (".dist-info", ".egg-info") and package in PACKAGES:
                found.setdefault(package, version.split("-py")[0])
    return found


def manifest(project: str) -> dict[str, str]:
    """The code in a directory of this project: relative path and SHA-256 of each file."""
    import hashlib

    found: dict[str, str] = {}
    for root in CODE_ROOTS:
        for directory, inner, names in os.walk(os.path.join(project, root)):
            inner[:] = sorted(name for name in inner if name not in _NOT_CODE)
            for name in names:
                if name.endswith(CODE_ENDINGS):
                    path = os.path.join(directory, name)
                    with open(path, "rb") as file:
                        digest = hashlib.sha256(file.read()).hexdigest()
                    found[os.path.relpath(path, project)] = digest
    return found


def digest_of(files: dict[str, str]) -> str:
    """One digest of a manifest; empty for no code at all."""
    import hashlib

    lines = "".join(f"{files[path]} {path}\n" for path in sorted(files))
    return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest() if files else ""


def disk(path: str) -> dict[str, Any]:
    """The file system that ``path`` is on or would be made on."""
    while not os.path.lexists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    facts = os.statvfs(path)
    return {
        "existing": path,
        "is_directory": os.path.isdir(path),
        "writable": os.access(path, os.W_OK | os.X_OK),
        "free": facts.f_bavail * facts.f_frsize,
    }


def interface_to(address: str) -> str:
    """The interface whose address this host would use to reach ``address``; "" if none."""
    import fcntl
    import socket
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
            own = probe.getsockname()[0]
        except OSError:
            return ""
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == own:
                return name
    return ""


def look(wish: dict[str, Any]) -> dict[str, Any]:
    """Everything that ``wish`` asks for."""
    project, exp_dir = str(wish["project"]), str(wish["exp_dir"])
    answer: dict[str, Any] = {
        "version": "{}.{}.{}".format(*sys.version_info[:3]),
        "executable": sys.executable,
        "packages": packages(),
        "disk": disk(exp_dir),
        "project": os.path.isfile(os.path.join(project, "flagscale", "launch", "agent.py")),
        "missing": [path for path in wish["paths"] if not os.path.exists(path)],
    }
    if wish.get("code"):
        answer["code"] = digest_of(manifest(project))
    if wish.get("backend") and answer["project"]:
        answer["backend"] = backend(wish["backend"], [sys.executable])
    return answer


def backend(wish: dict[str, Any], python: list[str]) -> dict[str, Any]:
    """Whether ``python``, in the environment of the ranks, can use the communication backend."""
    import subprocess

    own = wish["environment"]
    path = [wish["project"], own.get("PYTHONPATH") or os.environ.get("PYTHONPATH", "")]
    environment = dict(os.environ, **own)
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in path if entry)
    try:
        done = subprocess.run(
            [*python, "-m", "flagscale.comm.check", *wish["words"]],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=BACKEND_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"its Python gives no answer within {BACKEND_SECONDS} s"}
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])  # type: ignore[no-any-return]
    return {"problem": lines[-1] if lines else "its Python does not answer"}


def main() -> None:
    """Do what the first argument says and print JSON."""
    verb, argument = sys.argv[1:3]
    if verb == "look":
        answer: Any = look(json.loads(argument))
    elif verb == "manifest":
        answer = manifest(argument)
    else:
        answer = interface_to(argument)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
