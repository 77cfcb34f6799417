"""Looks at a host's Python world: versions of packages, code; and has modules of this project
answer there. Standard library alone.

Travels to the host as text and runs there with the host's own Python, whatever its version, so
it imports nothing of this project and stays with what Python 3.7 understands. The launcher
imports it too: both sides must take the same digest of the same code. Run without ``site``, which
takes longer than all the rest. What it answers is kept in a file, see :mod:`.python_world`.
"""

# Every host pays for what is imported here, and pathlib is not needed.
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
    "wandb",
)
ANSWER_SECONDS = 50
CODE_ROOTS = ("flagscale", os.path.join("third_party", "Megatron-LM"))
CODE_ENDINGS = (".py", ".json", ".yaml", ".cpp", ".cu", ".h", ".so")
_NOT_CODE = ("__pycache__", ".git")


class World:
    """What there is to tell, and what it was made from: ``made`` has a mark for each path that
    was there, the empty text for one that was not."""

    def __init__(self) -> None:
        self.packages: dict[str, str] = {}
        self.made: dict[str, str] = {}

    def uses(self, path: str) -> bool:
        """Note that the answer depends on ``path``, before it is looked at; whether it is there."""
        path = os.path.abspath(path)
        if path not in self.made:
            try:
                self.made[path] = mark(os.stat(path))
            except OSError:
                self.made[path] = ""
        return bool(self.made[path])

    def search(self, directories: list[str]) -> None:
        """Take in the versions of the packages that matter, from the names of their metadata
        directories: importing them would take seconds."""
        for directory in directories:
            if not directory or not self.uses(directory) or not os.path.isdir(directory):
                continue
            for name in os.listdir(directory):
                stem, ending = os.path.splitext(name)
                package, _, version = stem.partition("-")
                package = package.lower().replace(".", "_")
                if ending in (".dist-info", ".egg-info") and package in PACKAGES:
                    self.packages.setdefault(package, version.split("-py")[0])


def mark(status: os.stat_result) -> str:
    """What `stat -c %u,%a,%d:%i:%s:%.9Y:%.9Z` prints."""
    place = f"{status.st_dev}:{status.st_ino}:{status.st_size}"
    for time in (status.st_mtime_ns, status.st_ctime_ns):
        place += f":{time // 10**9}.{time % 10**9:09d}"
    return f"{status.st_uid},{status.st_mode & 0o7777:o},{place}"


def own_directories(world: World) -> list[str]:
    """Where this Python finds packages, as ``site`` would have it, without running what ``.pth``
    files say."""
    import site

    home = os.path.dirname(os.path.abspath(sys.executable))
    prefixes, user = list(site.PREFIXES), True
    for directory in (home, os.path.dirname(home)):
        config = os.path.join(directory, "pyvenv.cfg")
        if world.uses(config):
            with open(config, encoding="utf-8", errors="replace") as file:
                words = [line.lower().split() for line in file]
            user = ["include-system-site-packages", "=", "true"] in words
            prefixes = [os.path.dirname(home), *(prefixes if user else [])]
            sys.prefix = prefixes[0]  # without it Debian's site overlooks site-packages there
            break
    found = site.getsitepackages(prefixes)
    if user and site.check_enableusersite():
        found.insert(0, site.getusersitepackages())
    for prefix in prefixes:
        world.uses(os.path.join(prefix, "conda-meta", "history"))
    return [*sys.path, *found, *(more for one in found for more in _added(world, one))]


def _added(world: World, directory: str) -> list[str]:
    """The directories that ``.pth`` files add."""
    found = []
    for name in sorted(os.listdir(directory)) if os.path.isdir(directory) else ():
        path = os.path.join(directory, name)
        if name.endswith(".pth") and world.uses(path):
            with open(path, encoding="utf-8", errors="replace") as file:
                lines = [line.strip() for line in file]
            found += [os.path.join(directory, line) for line in lines if line[:7] != "import "]
    return [path for path in found if os.path.isdir(path) and path != directory]


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


def look(project: str, compared: str, python: str, kept: str, key: str) -> list[str]:
    """The lines that tell everything, kept in the file ``kept`` under ``key``, too. ``compared``:
    whether code is. ``python`` is what this Python was called by."""
    world = World()
    for path in (_program(python), sys.executable):
        world.uses(path)
    world.search(own_directories(world))
    if "torch" not in world.packages:
        # Something finds it that is no directory here, or it is not there.
        import site

        site.main()
        world.search(sys.path)
    version = ".".join(map(str, sys.version_info[:3]))
    lines = [_told("version", version), _told("executable", sys.executable)]
    lines += [_told("package " + name, world.packages[name]) for name in sorted(world.packages)]
    if compared:
        lines.append(_told("code", digest_of(manifest(project))))
    if kept:
        there = sorted(world.made.items())
        made = [f"made {m} {path}" if m else f"gone {path}" for path, m in there]
        keep(kept, [key, *made, *lines, "end"])
    return lines


def _told(name: str, value: str) -> str:
    value = value.replace("%", "%25").replace("\n", "%0A")
    return f"= {name} {value}"


def _program(name: str) -> str:
    """The file that a shell means by ``name``."""
    if "/" in name:
        return name
    places = [os.path.join(place, name) for place in os.environ.get("PATH", "").split(os.pathsep)]
    return next((place for place in places if os.access(place, os.X_OK)), name)


def keep(path: str, lines: list[str]) -> None:
    """Write a file that only this user can read, whole or not at all. That it can't be written is
    no reason to fail: the next one asks again."""
    directory = os.path.dirname(path)
    part = f"{path}.{os.getpid()}"
    if any("\n" in line for line in lines):
        return
    try:
        os.makedirs(directory, 0o700, exist_ok=True)
        status = os.lstat(directory)
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            return
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(os.fsencode("".join(line + "\n" for line in lines)))
            os.replace(part, path)
        except OSError:
            os.unlink(part)
    except OSError:
        pass


def ask(*questions: str) -> list[str]:
    """The lines that tell what modules answer to questions: its name and the answer, as JSON."""
    import json

    found = []
    for question in map(json.loads, questions):
        # Code that is yet to be copied here has nothing to answer.
        if os.path.isfile(os.path.join(question["project"], "flagscale", "launcher", "agent.py")):
            told = [question["name"], answer(question, [sys.executable])]
            found.append(_told("answer", json.dumps(told)))
    return found


def answer(question: dict[str, Any], python: list[str]) -> dict[str, Any]:
    """What a module of the project says, run by ``python`` in the environment of the ranks: one
    line of JSON. ``problem`` in it, where it does not answer."""
    import json
    import subprocess

    own = {name: filled(parts, os.environ) for name, parts in question["environment"].items()}
    path = [question["project"], own.get("PYTHONPATH") or os.environ.get("PYTHONPATH", "")]
    environment = dict(os.environ, **own)
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in path if entry)
    try:
        done = subprocess.run(
            [*python, "-m", question["module"], *question["words"]],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ANSWER_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"its Python gives no answer within {ANSWER_SECONDS} s"}
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])  # type: ignore[no-any-return]
    return {"problem": lines[-1] if lines else "its Python does not answer"}


def filled(parts: list[Any], environment: Any) -> str:
    """A value that :func:`flagscale.config.interpolation.parts` has taken apart, with the variables
    of this environment in the place of references to them."""
    text = ""
    for part in parts:
        if isinstance(part, str):
            text += part
        elif environment.get(part[1]):
            text += part[0] + environment[part[1]] + part[2]
    return text


def main() -> None:
    """Do what the first argument says and print the answer."""
    verb, words = sys.argv[1], sys.argv[2:]
    if verb == "look":
        text = "\n".join(look(*words))
    elif verb == "ask":
        text = "\n".join(ask(*words))
    elif verb == "manifest":
        import json

        text = json.dumps(manifest(*words))
    else:
        text = interface_to(*words)
    sys.stdout.buffer.write(os.fsencode(text + "\n"))


if __name__ == "__main__":
    main()
