"""Our keys: read once for all hosts, and offered in an order that wastes no attempt.

A server counts every key that it refuses (``MaxAuthTries``, 6 by default), and each costs a round
trip, so the key that opened the last host is offered first to the next one.
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

# paramiko's words for an end of the connection; any other refusal is the host's.
_HUNG_UP = "transport shut down or saw EOF"


class Agent(AgentSSH):
    """An SSH agent behind one socket that all connections share."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._turn = threading.Lock()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(10)
        try:
            connection.connect(path)
            self._connect(connection)  # type: ignore[attr-defined]  # as paramiko's own Agent
        except BaseException:
            connection.close()
            raise

    def _send_message(self, msg: Message | bytes) -> tuple[int, Message]:
        # A question and its answer belong together, whichever thread asks.
        with self._turn:
            answer: tuple[int, Message] = super()._send_message(msg)  # type: ignore[misc]
        return answer

    def close(self) -> None:
        self._close()  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Identity:
    """A key, and what to call it in a message."""

    label: str
    key: paramiko.PKey

    @property
    def blob(self) -> bytes:
        return self.key.asbytes()


@dataclass(frozen=True)
class Unusable:
    """A key that was named and cannot be used, and why."""

    label: str
    reason: str
    public_blob: bytes | None = None


class Identities:
    """The keys of this user. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._load = functools.cache(load)
        self._agents: dict[str, Agent | None] = {}
        self._opened_last: bytes | None = None

    def close(self) -> None:
        for agent in self._agents.values():
            if agent is not None:
                agent.close()
        self._agents.clear()

    def log_in(self, transport: paramiko.Transport, target: SshTarget) -> None:
        """Authenticate as ``target.user`` with the first key the host accepts.

        Raises :class:`LoginError` that lists what was tried, :class:`GreetingTimeoutError` where
        the host stops answering, and :class:`LoginBrokenError` where it hangs up.
        """
        usable, unusable = self.candidates(target)
        tried: list[str] = []
        for identity in usable:
            try:
                more = transport.auth_publickey(target.user, identity.key)
            except paramiko.BadAuthenticationType as error:
                raise _other_methods(target, error.allowed_types) from error
            except paramiko.AuthenticationException as error:
                if "timeout" in str(error).lower():
                    raise errors.GreetingTimeoutError(
                        target.name, f"{target.route} stopped answering during the login"
                    ) from error
                tried.append(identity.label)
                if _HUNG_UP not in str(error):
                    continue
                if len(tried) == 1:
                    raise _broken(target, identity) from error
                break  # too many attempts
            except (paramiko.SSHException, EOFError, OSError) as error:
                raise _broken(target, identity) from error
            if more:
                raise _other_methods(target, more)
            self._opened_last = identity.blob
            return
        raise _refused(target, tried, unusable, len(usable))

    def candidates(self, target: SshTarget) -> tuple[list[Identity], list[Unusable]]:
        """The keys to offer, in order, and the keys that were named and cannot be."""
        with self._lock:
            held = {key.blob: key for key in self._agent_keys(target)}
            files: list[Identity] = []
            unusable: list[Unusable] = []
            for path in target.identity_files:
                loaded = self._load(path)
                if isinstance(loaded, Identity):
                    files.append(loaded)
                elif loaded.public_blob in held:
                    files.append(held[loaded.public_blob])
                else:
                    unusable.append(loaded)
        others = [] if target.identities_only else list(held.values())
        # As OpenSSH: what the user named first, then the agent's, then the usual files.
        ordered = others + files if target.default_identities else files + others
        unique = {identity.blob: identity for identity in reversed(ordered)}
        inverse = list(reversed(unique.values()))
        return sorted(inverse, key=lambda found: found.blob != self._opened_last), unusable

    def _agent_keys(self, target: SshTarget) -> Iterator[Identity]:
        path = target.agent_socket
        if path is None:
            return
        if path not in self._agents:
            try:
                self._agents[path] = Agent(path)
            except (OSError, paramiko.SSHException):
                self._agents[path] = None  # a stale SSH_AUTH_SOCK is no reason to fail
        agent = self._agents[path]
        for key in agent.get_keys() if agent is not None else ():
            label = getattr(key, "comment", "") or key.get_name()
            yield Identity(f"{label} (agent)", key)


def load(path: Path) -> Identity | Unusable:
    """Read a private key, with the certificate beside it where there is one."""
    public = path if path.suffix == ".pub" else path.with_name(path.name + ".pub")
    blob = _public_blob(public)
    if path.suffix == ".pub" and blob is not None:
        return Unusable(str(path), "its private key is not in the SSH agent", blob)
    try:
        key = paramiko.PKey.from_path(path)
        return Identity(str(path), key)
    except FileNotFoundError:
        return Unusable(str(path), "does not exist", blob)
    except OSError as error:
        return Unusable(str(path), error.strerror or str(error), blob)
    except (TypeError, paramiko.PasswordRequiredException):
        # What the cryptography package says when a passphrase is missing.
        return Unusable(str(path), f"has a passphrase: run `ssh-add {path}`", blob)
    except (ValueError, paramiko.SSHException) as error:
        return Unusable(str(path), f"is not a private key we can read ({error})", blob)


def _public_blob(path: Path) -> bytes | None:
    try:
        return base64.b64decode(path.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None


def _other_methods(target: SshTarget, methods: list[str]) -> errors.LoginError:
    return errors.LoginError(
        target.name,
        f"{target.route} wants {' or '.join(methods)} from user {target.user}; "
        "only keys work without someone at the keyboard",
    )


def _broken(target: SshTarget, offered: Identity) -> errors.LoginBrokenError:
    return errors.LoginBrokenError(
        target.name,
        f"{target.route} closed the connection during the login, when it was offered the key "
        f"{offered.label}: its sshd was killed, or the machine or network went away",
        hint="if it happens again, see sshd's log there; MaxAuthTries may be too small",
    )


def _refused(
    target: SshTarget, tried: list[str], unusable: list[Unusable], offered: int
) -> HostError:
    notes = [f"{key.label} {key.reason}" for key in unusable]
    if not offered:
        what = f"there is no key to log in to {target.route} as {target.user} with"
        hint = "; ".join(notes) or "set IdentityFile in ~/.ssh/config, or start an SSH agent"
        return errors.LoginError(target.name, what, hint=hint)
    what = f"{target.route} accepts none of our keys for user {target.user}: {', '.join(tried)}"
    notes.append(f"add the public key to {target.user}'s authorized_keys on the host")
    return errors.LoginError(target.name, what, hint="; ".join(notes))
