"""The user's SSH keys: read once for all hosts, and offered in an order that saves attempts.

A server counts every key that it refuses (``MaxAuthTries``, 6 by default), and each attempt
costs a round trip. Therefore the key that the previous host accepted is offered first to the
next one.
"""

from __future__ import annotations

import base64
import functools
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import paramiko
from paramiko.agent import AgentSSH
from paramiko.message import Message

from flagscale.hosts import errors
from flagscale.hosts.errors import HostError
from flagscale.hosts.ssh.ssh_config import SshTarget

# paramiko's message for a closed connection. Any other authentication error is the host's refusal.
_CONNECTION_CLOSED = "transport shut down or saw EOF"


class SshAgent(AgentSSH):
    """Client of an SSH agent, with one socket that all connections share."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._request_lock = threading.Lock()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(10)
        try:
            connection.connect(path)
            self._connect(connection)  # type: ignore[attr-defined]  # as paramiko's own Agent
        except BaseException:
            connection.close()
            raise

    def _send_message(self, msg: Message | bytes) -> tuple[int, Message]:
        # A request and its reply must not be interleaved with those of other threads.
        with self._request_lock:
            reply: tuple[int, Message] = super()._send_message(msg)  # type: ignore[misc]
        return reply

    def close(self) -> None:
        self._close()  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Identity:
    """A private key, and its label in messages."""

    label: str
    key: paramiko.PKey

    @property
    def blob(self) -> bytes:
        return self.key.asbytes()


@dataclass(frozen=True)
class UnusableKey:
    """A configured key that cannot be used, and the reason."""

    label: str
    reason: str
    public_blob: bytes | None = None


class Identities:
    """The user's keys. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._load = functools.cache(load_key)
        self._agents: dict[str, SshAgent | None] = {}
        self._last_accepted: bytes | None = None

    def close(self) -> None:
        for agent in self._agents.values():
            if agent is not None:
                agent.close()
        self._agents.clear()

    def log_in(self, transport: paramiko.Transport, target: SshTarget) -> None:
        """Authenticate as ``target.user`` with the first key that the host accepts.

        Raises:
            LoginError: the host accepts no key. The message lists the keys that were tried.
            SshTimeoutError: the host stopped answering.
            LoginBrokenError: the host closed the connection.
        """
        usable, unusable = self.list_candidates(target)
        refused_labels: list[str] = []
        for identity in usable:
            try:
                further_methods = transport.auth_publickey(target.user, identity.key)
            except paramiko.BadAuthenticationType as error:
                raise _method_error(target, error.allowed_types) from error
            except paramiko.AuthenticationException as error:
                if "timeout" in str(error).lower():
                    raise errors.SshTimeoutError(
                        target.name, f"{target.route} stopped answering during the login"
                    ) from error
                refused_labels.append(identity.label)
                if _CONNECTION_CLOSED not in str(error):
                    continue
                if len(refused_labels) == 1:
                    raise _closed_error(target, identity) from error
                break  # too many attempts
            except (paramiko.SSHException, EOFError, OSError) as error:
                raise _closed_error(target, identity) from error
            if further_methods:
                raise _method_error(target, further_methods)
            self._last_accepted = identity.blob
            return
        raise _refused_error(target, refused_labels, unusable, len(usable))

    def list_candidates(self, target: SshTarget) -> tuple[list[Identity], list[UnusableKey]]:
        """Return the keys to offer, in order, and the configured keys that cannot be used."""
        with self._lock:
            agent_keys = {key.blob: key for key in self._agent_keys(target)}
            files: list[Identity] = []
            unusable: list[UnusableKey] = []
            for path in target.identity_files:
                loaded = self._load(path)
                if isinstance(loaded, Identity):
                    files.append(loaded)
                elif loaded.public_blob in agent_keys:
                    files.append(agent_keys[loaded.public_blob])
                else:
                    unusable.append(loaded)
        unnamed_keys = [] if target.identities_only else list(agent_keys.values())
        # Same order as OpenSSH: configured keys, then the agent's, then the default files.
        ordered = unnamed_keys + files if target.default_identities else files + unnamed_keys
        unique = {identity.blob: identity for identity in reversed(ordered)}
        unique_in_order = list(reversed(unique.values()))
        return sorted(
            unique_in_order, key=lambda candidate: candidate.blob != self._last_accepted
        ), unusable

    def _agent_keys(self, target: SshTarget) -> Iterator[Identity]:
        path = target.agent_socket
        if path is None:
            return
        if path not in self._agents:
            try:
                self._agents[path] = SshAgent(path)
            except (OSError, paramiko.SSHException):
                self._agents[path] = None  # a stale SSH_AUTH_SOCK is not an error
        agent = self._agents[path]
        for key in agent.get_keys() if agent is not None else ():
            label = getattr(key, "comment", "") or key.get_name()
            yield Identity(f"{label} (agent)", key)


def load_key(path: Path) -> Identity | UnusableKey:
    """Read a private key, with its certificate if there is one next to it."""
    public = path if path.suffix == ".pub" else path.with_name(path.name + ".pub")
    blob = _read_public_blob(public)
    if path.suffix == ".pub" and blob is not None:
        return UnusableKey(str(path), "its private key is not in the SSH agent", blob)
    try:
        key = paramiko.PKey.from_path(path)
        return Identity(str(path), key)
    except FileNotFoundError:
        return UnusableKey(str(path), "does not exist", blob)
    except OSError as error:
        return UnusableKey(str(path), error.strerror or str(error), blob)
    except (TypeError, paramiko.PasswordRequiredException):
        # The cryptography package raises TypeError for a missing passphrase.
        return UnusableKey(str(path), f"has a passphrase: run `ssh-add {path}`", blob)
    except (ValueError, paramiko.SSHException) as error:
        return UnusableKey(str(path), f"is not a private key we can read ({error})", blob)


def _read_public_blob(path: Path) -> bytes | None:
    try:
        return base64.b64decode(path.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None


def _method_error(target: SshTarget, methods: list[str]) -> errors.LoginError:
    return errors.LoginError(
        target.name,
        f"{target.route} requires {' or '.join(methods)} of user {target.user}; "
        "only keys work without user interaction",
    )


def _closed_error(target: SshTarget, offered: Identity) -> errors.LoginBrokenError:
    return errors.LoginBrokenError(
        target.name,
        f"{target.route} closed the connection during the login, when it was offered the key "
        f"{offered.label}: its sshd was killed, or the machine or network went away",
        hint="if it happens again, see sshd's log there; MaxAuthTries may be too small",
    )


def _refused_error(
    target: SshTarget, refused_labels: list[str], unusable: list[UnusableKey], offered_count: int
) -> HostError:
    notes = [f"{key.label} {key.reason}" for key in unusable]
    if not offered_count:
        message = f"there is no key to log in to {target.route} as {target.user} with"
        hint = "; ".join(notes) or "set IdentityFile in ~/.ssh/config, or start an SSH agent"
        return errors.LoginError(target.name, message, hint=hint)
    labels = ", ".join(refused_labels)
    message = f"{target.route} accepts none of our keys for user {target.user}: {labels}"
    notes.append(f"add the public key to {target.user}'s authorized_keys on the host")
    return errors.LoginError(target.name, message, hint="; ".join(notes))
