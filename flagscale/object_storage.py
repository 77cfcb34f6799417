"""Object storage (S3, Google Cloud Storage, …) for checkpoints, through fsspec.

An *address* is a URL of fsspec, such as ``s3://bucket/prefix``. :func:`is_address` tells addresses
from paths. Credentials come from the environment and the files of the storage's own client; an
address never contains them, and no message shows them.

    python -m flagscale.object_storage ADDRESS

prints one line of JSON for the preflight of a host: see :func:`probe`.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flagscale.errors import CheckpointError, first_line

PART_BYTES = 16 << 20
"""Size of the parts in which files are uploaded and read."""
CONCURRENT_PARTS = 8
"""Parts that a process transfers at the same time. Memory holds at most that many."""
_MAX_PARTS = 9_000  # S3 takes 10,000
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*(?=://)")
_S3_SCHEMES = frozenset({"s3", "s3a"})
_SCHEMES_WITH_DIRECTORIES = frozenset({"file", "local", "hdfs", "sftp", "ssh", "smb"})
_UNUSABLE_SCHEMES = {
    "memory": "keeps files only as long as one process",
    "http": "cannot be written",
    "https": "cannot be written",
}
_INSTALL_HINT = "pip install 'flagscale[storage]', or the fsspec package of this storage"
_CREDENTIALS_HINT = (
    "set the variables that its client reads (S3: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY), or "
    "give the host a role"
)
_SECRET_VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_LOGIN = re.compile(r"(?<=://)[^\s/?#@]*@")
_QUERY = re.compile(r"\?[^\s'\"]*")
_MIN_SECRET_LENGTH = 8


def is_address(text: str) -> bool:
    """Return whether a text is an address of object storage, and not a path."""
    return _SCHEME.match(text) is not None


def explain_unusable(address: str) -> str | None:
    """Return the reason why checkpoints cannot be stored at an address; None if they can.

    The reason does not repeat the address, which may contain a password.
    """
    scheme, _, rest = address.partition("://")
    location = rest.partition("/")[0]
    if ":" in location.rpartition("@")[0]:
        return (
            f"a {scheme}:// address with a user and a password is refused, because scripts and "
            "logs show it; credentials belong into the environment"
        )
    if "?" in rest or "#" in rest:
        return f"expected a {scheme}:// address without ? and #, which may hold credentials"
    if scheme in _UNUSABLE_SCHEMES:
        return f"{scheme}:// {_UNUSABLE_SCHEMES[scheme]}; expected s3://, gs:// or the like"
    if "::" in address:
        return "expected one address, found several chained by ::"
    if not rest.strip("/"):
        return f"expected {scheme}://BUCKET/PREFIX, found no bucket"
    return None


class _TransferError(CheckpointError):
    """A request to object storage failed. ``lacks_credentials`` if the client had none."""

    lacks_credentials = False


@dataclass(frozen=True)
class StorageAddress:
    """Address of a directory or an object, with the operations of paths that checkpoints need."""

    text: str

    @classmethod
    def parse(cls, text: str) -> StorageAddress:
        """Parse an address.

        Raises:
            CheckpointError: it is not usable.
        """
        if reason := explain_unusable(text):
            raise CheckpointError(reason)
        return cls(text.rstrip("/"))

    def __str__(self) -> str:
        return self.text

    def __truediv__(self, name: str) -> StorageAddress:
        return StorageAddress(f"{self.text}/{name}")

    @property
    def name(self) -> str:
        return self.text.rpartition("/")[2]

    @property
    def parent(self) -> StorageAddress:
        return StorageAddress(self.text.rpartition("/")[0])


Location = Path | StorageAddress


def parse_location(text: str) -> Location:
    """Return the address or the path that a text is.

    Raises:
        CheckpointError: it is an address that is not usable.
    """
    return StorageAddress.parse(text) if is_address(text) else Path(text)


class ObjectStore:
    """Client of the storage of an address.

    Requests that fail for the moment (throttling, errors of the server, lost connections) are
    repeated with increasing delays by the client of the storage. What still fails is raised as an
    error of one sentence. All methods raise CheckpointError, and FileNotFoundError for an object
    that does not exist.
    """

    def __init__(self, address: StorageAddress, *, is_patient: bool = True) -> None:
        """Create the client; nothing is requested yet.

        Args:
            address: an address in this storage.
            is_patient: repeat failed requests for about a minute, otherwise for some seconds.

        Raises:
            CheckpointError: the package for this storage is not installed.
        """
        self.address = address
        self._scheme = address.text.partition("://")[0]
        try:
            import fsspec

            self._fs: Any = fsspec.filesystem(
                self._scheme, **_client_options(self._scheme, is_patient=is_patient)
            )
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"{address}: {self._scheme}:// cannot be used: {_describe_without_secrets(error)}",
                hint=_INSTALL_HINT,
            ) from error
        if self._scheme in _S3_SCHEMES and not is_patient:
            self._fs.retries = 2

    def list_sizes(self, address: StorageAddress) -> dict[str, int]:
        """Return the sizes of all objects below an address, by name relative to it."""
        try:
            prefix = self._path(address).rstrip("/")
            found = self._fs.find(prefix, detail=True)
        except FileNotFoundError as error:
            if _names_bucket(error):
                raise self._failure(self.address, error) from error
            return {}
        except Exception as error:
            raise self._failure(self.address, error) from error
        return {
            str(name)[len(prefix) + 1 :]: int(info["size"] or 0)
            for name, info in found.items()
            if str(name).startswith(f"{prefix}/") and info.get("type", "file") == "file"
        }

    def read(
        self, address: StorageAddress, begin: int | None = None, end: int | None = None
    ) -> bytes:
        """Return the content of an object, or a range of it."""
        try:
            content: bytes = self._fs.cat_file(self._path(address), start=begin, end=end)
        except FileNotFoundError:
            raise
        except Exception as error:
            raise self._failure(address, error) from error
        if begin is not None and end is not None and len(content) != end - begin:
            raise CheckpointError(f"{address} ends before byte {end:,}")
        return content

    def write(self, address: StorageAddress, content: bytes) -> None:
        """Write a small object."""
        try:
            self._make_parent(address)
            self._fs.pipe_file(self._path(address), content)
        except Exception as error:
            raise self._failure(address, error) from error

    def upload(self, path: Path, address: StorageAddress) -> None:
        """Upload a file in parts, of which memory holds at most :data:`CONCURRENT_PARTS`."""
        options = {}
        if self._scheme in _S3_SCHEMES:
            part_bytes = max(PART_BYTES, path.stat().st_size // _MAX_PARTS + 1)
            options = {"chunksize": part_bytes, "max_concurrency": CONCURRENT_PARTS}
        try:
            self._make_parent(address)
            self._fs.put_file(str(path), self._path(address), **options)
        except Exception as error:
            raise self._failure(address, error) from error

    def delete(self, addresses: Iterable[StorageAddress]) -> None:
        """Delete objects; those that do not exist are skipped."""
        paths = [self._path(address) for address in addresses]
        try:
            if self._scheme in _S3_SCHEMES and paths:
                self._fs.rm(paths)  # a thousand in one request
                return
            for path in paths:
                if self._fs.exists(path):
                    self._fs.rm_file(path)
        except FileNotFoundError:
            return
        except Exception as error:
            raise self._failure(self.address, error) from error

    def delete_directory(self, address: StorageAddress) -> None:
        """Delete an empty directory, where the storage has directories."""
        if self._scheme in _SCHEMES_WITH_DIRECTORIES:
            with suppress(OSError):
                self._fs.rmdir(self._path(address))

    def _make_parent(self, address: StorageAddress) -> None:
        """Create the directory of an object, where the storage has directories."""
        if self._scheme in _SCHEMES_WITH_DIRECTORIES:
            self._fs.makedirs(self._path(address.parent), exist_ok=True)

    def _path(self, address: StorageAddress) -> str:
        return str(self._fs._strip_protocol(address.text))

    def _failure(self, address: StorageAddress, error: Exception) -> CheckpointError:
        name = type(error).__name__
        failure = _TransferError(f"{address}: {_describe(error)}")
        if "Credentials" in name or "CredentialRetrieval" in name:
            failure = _TransferError(
                f"{address}: this host has no credentials", hint=_CREDENTIALS_HINT
            )
            failure.lacks_credentials = True
        elif isinstance(error, PermissionError):
            failure.hint = "the credentials of this host need to list, read, write and delete there"
        return failure


def _client_options(scheme: str, *, is_patient: bool) -> dict[str, Any]:
    """Return the options of a storage's client."""
    if scheme not in _S3_SCHEMES:
        return {"use_listings_cache": False}
    retries = {"max_attempts": 6 if is_patient else 2, "mode": "standard"}
    return {
        "use_listings_cache": False,
        "config_kwargs": {
            "retries": retries,
            "connect_timeout": 10,
            "read_timeout": 60 if is_patient else 10,
            "max_pool_connections": 2 * CONCURRENT_PARTS,
        },
    }


def _names_bucket(error: FileNotFoundError) -> bool:
    return "bucket" in str(error).lower()


def _describe(error: Exception) -> str:
    """Return the reason of a failed request in one line without secrets."""
    if isinstance(error, PermissionError):
        return f"access is denied ({_describe_without_secrets(error)})"
    if isinstance(error, FileNotFoundError) and _names_bucket(error):
        return "the bucket does not exist"
    return _describe_without_secrets(error)


def _describe_without_secrets(error: BaseException) -> str:
    text = error.strerror if isinstance(error, OSError) else None
    text = text or first_line(error)
    for name in _SECRET_VARIABLES:
        value = os.environ.get(name, "")
        if len(value) >= _MIN_SECRET_LENGTH:
            text = text.replace(value, "<hidden>")
    return _QUERY.sub("", _LOGIN.sub("", text))


def check_usable(store: ObjectStore) -> None:
    """List the address of a client, and write and delete an object there.

    Raises:
        CheckpointError: one of these fails.
    """
    probe_address = store.address / f".flagscale_probe_{secrets.token_hex(8)}"
    store.list_sizes(probe_address)
    store.write(probe_address, b"flagscale checks that checkpoints can be saved here\n")
    store.delete([probe_address])


def probe(address: str) -> dict[str, Any]:
    """Check that this host can list and write an address.

    Returns:
        ``found`` if it can; otherwise ``problem`` and ``hint``, and ``lacks_credentials`` if the
        client found none in its environment.
    """
    try:
        check_usable(ObjectStore(StorageAddress.parse(address), is_patient=False))
    except CheckpointError as error:
        return {
            "problem": error.message,
            "hint": error.hint,
            "lacks_credentials": getattr(error, "lacks_credentials", False),
        }
    return {"found": f"{address} can be listed and written"}


def join_ranges(
    ranges: Iterable[tuple[int, int]], *, max_gap: int, max_bytes: int
) -> list[tuple[int, int]]:
    """Join sorted, half-open ranges with small gaps, up to a size; larger ranges stay as they are.

    Every range is within one of the results.
    """
    joined: list[tuple[int, int]] = []
    for begin, end in ranges:
        if joined and begin - joined[-1][1] <= max_gap and end - joined[-1][0] <= max_bytes:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def main(argv: Sequence[str]) -> int:
    """Print :func:`probe` of the address in ``argv`` as JSON; return the exit code."""
    reply: Mapping[str, Any] = probe(*argv)
    print(json.dumps(reply))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
