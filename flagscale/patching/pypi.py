"""Download of a source archive with pip, which uses the user's mirrors, proxies and logins."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from flagscale.errors import BackendSourceError

_UNREACHABLE_PATTERN = re.compile(
    r"Connection|ConnectTimeout|Name or service not known|Temporary failure in name resolution"
    r"|Network is unreachable|Could not find a version|No matching distribution|Max retries",
    re.IGNORECASE,
)
_FOUND_DIGEST_PATTERN = re.compile(r"Got\s+([0-9a-f]{64})")


def download_sdist(package: str, version: str, sha256: str, target: Path) -> None:
    """Download the source archive of ``package`` to ``target``, atomically.

    Raises:
        BackendSourceError: no network, no such release, or another content than ``sha256``.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".download-") as scratch:
        requirements = Path(scratch) / "requirements.txt"
        requirements.write_text(f"{package}=={version} --hash=sha256:{sha256}\n", encoding="utf-8")
        finished = subprocess.run(
            _pip_command(package, Path(scratch), requirements),
            env=_pip_environment(),
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        archives = sorted(Path(scratch).glob("*.tar.gz"))
        if finished.returncode != 0 or len(archives) != 1:
            raise _download_error(package, version, sha256, finished.stdout + finished.stderr)
        archives[0].replace(target)


def _pip_command(package: str, destination: Path, requirements: Path) -> list[str]:
    return [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-binary",
        package,
        "--require-hashes",
        "--disable-pip-version-check",
        "--no-input",
        "--progress-bar",
        "off",
        "--dest",
        str(destination),
        "--requirement",
        str(requirements),
    ]


def _pip_environment() -> dict[str, str]:
    """Return our environment with this interpreter's directory first on PATH.

    pip asks the archive for its metadata, and the archive's setup script runs ``python3``, which
    must be the interpreter whose build environment pip has prepared.
    """
    python_directory = str(Path(sys.executable).parent)
    return {
        **os.environ,
        "PATH": os.pathsep.join([python_directory, os.environ.get("PATH", os.defpath)]),
    }


def _download_error(package: str, version: str, sha256: str, output: str) -> BackendSourceError:
    release = f"{package} {version}"
    alternatives = "or take what is installed: --source installed; or a copy: --path DIRECTORY"
    if "DO NOT MATCH THE HASHES" in output:
        digest_match = _FOUND_DIGEST_PATTERN.search(output)
        found_digest = digest_match.group(1) if digest_match else "unknown"
        return BackendSourceError(
            f"{release}: the downloaded archive is not the pinned one\n"
            f"  expected sha256 {sha256}\n  found    sha256 {found_digest}",
            hint="do not use it; check your mirror, then backend.yaml's pin",
        )
    if "No module named pip" in output:
        return BackendSourceError(
            f"{release}: {sys.executable} has no pip to download it with",
            hint=f"run {sys.executable} -m ensurepip, {alternatives}",
        )
    # pip reports every retry at length and the outcome last.
    lines = [line for line in output.strip().splitlines() if "WARNING: Retrying" not in line]
    last_lines = "\n".join(f"  {line.strip()}" for line in lines[-6:])
    if _UNREACHABLE_PATTERN.search(output):
        return BackendSourceError(
            f"{release}: no registry that pip knows could be reached, or none has it:\n"
            f"{last_lines}",
            hint=f"check the network, pip's index-url and proxy; {alternatives}",
        )
    return BackendSourceError(
        f"{release}: pip could not download it:\n{last_lines}", hint=alternatives
    )
