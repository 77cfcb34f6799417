"""S3 server on this machine, and a proxy in front of it that injects faults.

The server is moto's, which keeps objects in memory. Tests and benchmarks use both::

    with run_s3_server() as server, run_fault_proxy(server.endpoint) as proxy:
        proxy.set_faults(slow_down=0.2, latency=0.05)
        subprocess.run(command, env={**os.environ, **s3_environment(proxy.endpoint)})

Requires moto and aiohttp.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flagscale.free_port import free_port

BUCKET = "checkpoints"
_FAULTS_PATH = "/__faults__"
_START_SECONDS = 60
_SLOW_DOWN = (
    '<?xml version="1.0" encoding="UTF-8"?><Error><Code>SlowDown</Code>'
    "<Message>Please reduce your request rate.</Message></Error>"
)
_DENIED = _SLOW_DOWN.replace("SlowDown", "AccessDenied")
_INTERNAL_ERROR = _SLOW_DOWN.replace("SlowDown", "InternalError")


@dataclass(frozen=True)
class Server:
    """A server on this machine."""

    endpoint: str
    process: subprocess.Popen[bytes]


class FaultProxy(Server):
    """Proxy that delays, refuses and cuts requests at random."""

    def set_faults(self, **faults: float) -> dict[str, int]:
        """Replace the faults; return how often each has occurred, and the bytes of responses.

        Args:
            faults: ``latency`` in seconds, and probabilities between 0 and 1: ``slow_down`` and
                ``internal_error`` answer 503 and 500, ``denied`` answers 403, and ``cut`` closes
                the connection in the middle of a response. Those that are not given do not occur.
        """
        return set_faults(self.endpoint, faults)


def set_faults(endpoint: str, faults: Mapping[str, float]) -> dict[str, int]:
    """Replace the faults of a proxy; see :meth:`FaultProxy.set_faults`."""
    body = json.dumps(faults).encode()
    request = urllib.request.Request(endpoint + _FAULTS_PATH, body, method="POST")
    with urllib.request.urlopen(request, timeout=30) as reply:
        counts: dict[str, int] = json.load(reply)
    return counts


def s3_environment(endpoint: str) -> dict[str, str]:
    """Return the variables with which an S3 client uses a server of this machine."""
    return {
        "AWS_ACCESS_KEY_ID": "testing-access-key",
        "AWS_SECRET_ACCESS_KEY": "testing-secret-of-forty-characters-000000",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@contextmanager
def run_s3_server() -> Iterator[Server]:
    """Run moto's server with an empty bucket :data:`BUCKET`."""
    port = free_port()
    command = ["-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with _run([sys.executable, *command]) as process:
        server = Server(f"http://127.0.0.1:{port}", process)
        _wait_until_ready(server)
        create_bucket(server.endpoint)
        yield server


def create_bucket(endpoint: str, bucket: str = BUCKET) -> None:
    """Create a bucket of moto's server, which requires no signature."""
    authorization = "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request"
    request = urllib.request.Request(
        f"{endpoint}/{bucket}", method="PUT", headers={"Authorization": authorization}
    )
    with urllib.request.urlopen(request, timeout=30):
        pass


@contextmanager
def run_fault_proxy(upstream: str, seed: int = 0) -> Iterator[FaultProxy]:
    """Run a proxy in front of a server, without faults at first."""
    port = free_port()
    command = [str(Path(__file__).resolve()), "--upstream", upstream, "--port", str(port)]
    with _run([sys.executable, *command, "--seed", str(seed)]) as process:
        proxy = FaultProxy(f"http://127.0.0.1:{port}", process)
        _wait_until_ready(proxy)
        yield proxy


@contextmanager
def _run(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _wait_until_ready(server: Server) -> None:
    port = int(server.endpoint.rpartition(":")[2])
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise RuntimeError(f"the server of {server.endpoint} has ended")
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"the server of {server.endpoint} does not start")


class _Faults:
    """Faults of a proxy, and how often each has occurred."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.values: Mapping[str, float] = {}
        self.counts = dict.fromkeys(
            ("requests", "bytes", "slow_down", "internal_error", "denied", "cut"), 0
        )

    def occurs(self, name: str) -> bool:
        """Draw whether a fault occurs now."""
        does_occur = self._random.random() < self.values.get(name, 0)
        self.counts[name] += does_occur
        return does_occur


async def _serve_proxy(upstream: str, port: int, seed: int) -> None:
    from aiohttp import ClientSession, ClientTimeout, DummyCookieJar, web

    faults = _Faults(seed)

    async def handle(request: web.Request) -> web.StreamResponse:
        if request.path == _FAULTS_PATH:
            faults.values = await request.json()
            return web.json_response(faults.counts)
        faults.counts["requests"] += 1
        body = await request.read()
        await asyncio.sleep(faults.values.get("latency", 0))
        if faults.occurs("slow_down"):
            return web.Response(status=503, text=_SLOW_DOWN, content_type="application/xml")
        if faults.occurs("internal_error"):
            return web.Response(status=500, text=_INTERNAL_ERROR, content_type="application/xml")
        if faults.occurs("denied"):
            return web.Response(status=403, text=_DENIED, content_type="application/xml")
        async with session.request(
            request.method,
            upstream + request.raw_path,
            data=body,
            headers=request.headers,
            skip_auto_headers=("Content-Type", "User-Agent", "Accept", "Accept-Encoding"),
            allow_redirects=False,
        ) as reply:
            headers = {
                name: value
                for name, value in reply.headers.items()
                if name.lower() not in ("transfer-encoding", "connection")
            }
            response = web.StreamResponse(status=reply.status, headers=headers)
            await response.prepare(request)
            content = await reply.read()
            faults.counts["bytes"] += len(content)
            if content and faults.occurs("cut"):
                await response.write(content[: len(content) // 2])
                assert request.transport is not None
                request.transport.close()
                return response
            await response.write(content)
            return response

    application = web.Application(client_max_size=1 << 30)
    application.router.add_route("*", "/{path:.*}", handle)
    async with ClientSession(
        timeout=ClientTimeout(total=120), auto_decompress=False, cookie_jar=DummyCookieJar()
    ) as session:
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.Event().wait()


def main() -> None:
    """Run the proxy until it is killed."""
    parser = argparse.ArgumentParser(description="proxy that injects faults")
    parser.add_argument("--upstream", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options: Any = parser.parse_args()
    asyncio.run(_serve_proxy(options.upstream, options.port, options.seed))


if __name__ == "__main__":
    main()
