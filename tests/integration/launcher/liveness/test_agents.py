"""Tests of real agents, each acting as one host, and their reactions to each other's faults."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from support.liveness_lab import AgentHosts, agent_hosts
from support.waiting import wait_for

from flagscale.free_port import free_port
from flagscale.hosts import processes
from flagscale.launcher.liveness.protocol import MAGIC
from flagscale.module_command import python_arguments

pytestmark = pytest.mark.integration


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[AgentHosts]:
    with agent_hosts(tmp_path) as hosts:
        yield hosts


@pytest.fixture
def one_host(tmp_path: Path) -> Iterator[AgentHosts]:
    with agent_hosts(tmp_path, 1) as hosts:
        yield hosts


def test_an_exception_ends_the_job_everywhere_and_is_named(two_hosts: AgentHosts) -> None:
    two_hosts.start(TOY_1_0="raise")
    assert two_hosts.wait_for_exit_codes() == [1, 1]
    for station in (two_hosts[0], two_hosts[1]):
        failure = station.exit_record()["failure"]
        named = (failure["host"], failure["rank"], failure["exit_code"])
        assert named == ("h1", 1, 1), (failure, two_hosts.read_outputs())
        assert failure["reason"].startswith("failed: ValueError: bad data in shard 7")
        assert "Traceback" in failure["traceback"]
        assert failure["log"].endswith("/0/stderr.log")
    two_hosts.wait_until_ended(1)


def test_a_killed_rank_is_named_and_not_the_one_that_lost_its_peer(two_hosts: AgentHosts) -> None:
    two_hosts.start()
    two_hosts.wait_until_joined()
    os.kill(two_hosts[1].rank_pid(), signal.SIGKILL)
    assert two_hosts.wait_for_exit_codes() == [1, 1]
    failure = two_hosts[0].exit_record()["failure"]
    assert (failure["host"], failure["rank"], failure["exit_code"]) == ("h1", 1, -9)
    assert two_hosts[1].exit_record()["failure"] == failure
    two_hosts.wait_until_ended(1)


def test_a_stopped_rank_is_a_stall_that_is_named(two_hosts: AgentHosts) -> None:
    two_hosts.start({"hang_detection_timeout": 3.0})
    two_hosts.wait_until_joined()
    os.kill(two_hosts[1].rank_pid(), signal.SIGSTOP)
    assert two_hosts.wait_for_exit_codes() == [1, 1]
    failure = two_hosts[0].exit_record()["failure"]
    assert (failure["host"], failure["rank"]) == ("h1", 1)
    assert "stalled" in failure["reason"]
    assert "SIGSTOP" in failure["reason"]
    # The other rank has written the stack of its collective.
    log = next((two_hosts[0].run_dir / "ranks").glob("*/attempt_0/0/stderr.log")).read_text()
    assert "in barrier" in log
    two_hosts.wait_until_ended(1)


def test_stuck_rank_is_found_by_its_stack_and_a_checkpoint_is_no_stall(
    two_hosts: AgentHosts,
) -> None:
    two_hosts.start(
        {"hang_detection_timeout": 3.0, "max_restarts": 1},
        light=True,
        TOY_1_0="stuck",
        TOY_0_1="busy,raise",
    )
    assert two_hosts.wait_for_exit_codes() == [1, 1]
    restart = two_hosts.job_summary()["restarts"][0]["failure"]
    assert (restart["host"], restart["rank"]) == ("h1", 1)
    assert "in work" in restart["traceback"]
    # In the second attempt a checkpoint takes twice the time and is left in peace.
    assert "stalled" not in two_hosts[0].exit_record()["failure"]["reason"]


def test_whole_job_restarts_with_notifications(two_hosts: AgentHosts, tmp_path: Path) -> None:
    notified = tmp_path / "told"
    notified.mkdir()
    command = f"cat > {notified}/$(date +%s%N); echo -n told >&2; sleep 600 & exit 7"
    two_hosts.start(
        {"max_restarts": 2, "notify_on": ("restarted", "finished")},
        light=True,
        FLAGSCALE_NOTIFY_COMMAND=command,
        TOY_1_0="raise",
        TOY_STEPS="20",
    )
    assert two_hosts.wait_for_exit_codes() == [0, 0]
    assert "a notification failed: the command ended with exit code 7" in two_hosts[0].read_output()
    job = two_hosts.job_summary()
    assert (job["attempt"], job["attempts"], job["failure"]) == (2, 3, None)
    assert job["restarts"][0]["failure"]["rank"] == 1
    for number in (0, 1):
        assert two_hosts[number].exit_record()["attempt"] == 2
        assert two_hosts[number].exit_record()["failure"] is None
        assert (two_hosts[number].run_dir / "status.1" / f"rank_{number}.jsonl").exists()
        assert len(list((two_hosts[number].run_dir / "ranks").iterdir())) == 2
    # Each notification is a process of its own, and may be delayed.
    notices = {(n := json.loads(path.read_text()))["event"]: n for path in notified.iterdir()}
    assert notices.keys() == {"restarted", "finished"}
    assert (notices["restarted"]["attempt"], notices["restarted"]["attempts"]) == (2, 3)
    assert "h1: rank 1 failed: ValueError" in notices["restarted"]["text"]
    assert notices["finished"]["name"] == "toy"


def test_a_stop_of_one_host_stops_all_and_starts_nothing(
    two_hosts: AgentHosts, tmp_path: Path
) -> None:
    notified = tmp_path / "told"
    two_hosts.start(
        {"stop_grace": 30.0, "max_restarts": 3, "notify_on": ["finished"]},
        light=True,
        FLAGSCALE_NOTIFY_COMMAND=f"cat >> {notified}",
        TOY_0_0="save",
        TOY_1_0="save",
    )
    two_hosts.wait_until_joined()
    two_hosts[1].agent.terminate()
    assert two_hosts.wait_for_exit_codes() == [0, 0]
    for number in (0, 1):
        logs = (two_hosts[number].run_dir / "ranks").glob("*/attempt_0/0/stdout.log")
        assert "saved" in next(logs).read_text()
        assert two_hosts[number].exit_record()["signal"] == signal.SIGTERM
        assert two_hosts[number].exit_record()["failure"] is None
    notice = json.loads(notified.read_text())
    assert (notice["event"], notice["text"].rpartition(" run ")[0]) == ("stopped", "toy:")
    two_hosts.wait_until_ended(1)


def test_host_that_ends_before_the_rendezvous_reports_its_end(two_hosts: AgentHosts) -> None:
    """It is reported with its own reason, not as a lost host."""
    program = "print('up', flush=True); import time; time.sleep(60)"
    two_hosts.start(command=[sys.executable, "-c", program])
    two_hosts[0].agent.send_signal(signal.SIGSTOP)
    wait_for(lambda: "up" in two_hosts[1].read_output())
    two_hosts[1].agent.terminate()
    wait_for(lambda: len(two_hosts[1].run_processes()) == 1)
    two_hosts[0].agent.send_signal(signal.SIGCONT)
    two_hosts.wait_for_exit_codes()
    for station in (two_hosts[0], two_hosts[1]):
        assert (station.exit_record()["signal"], station.exit_record()["failure"]) == (
            signal.SIGTERM,
            None,
        )


def test_on_failure_leave(two_hosts: AgentHosts) -> None:
    """Ranks that do not need the failed host continue."""
    program = (
        "import os, sys, time; first = '/h0/' in os.environ['FLAGSCALE_STATUS_DIR'];"
        "time.sleep(4 if first else 0.5); sys.exit(0 if first else 3)"
    )
    two_hosts.start({"on_failure": "leave"}, command=[sys.executable, "-c", program])
    assert two_hosts.wait_for_exit_codes() == [0, 3]
    assert two_hosts[1].exit_record()["failure"]["exit_code"] == 3
    assert two_hosts.job_summary()["failure"]["host"] == "h1"


def test_a_command_that_an_agent_had_to_kill_is_no_first_failure(two_hosts: AgentHosts) -> None:
    program = (
        "import os, signal, sys, time; first = '/h0/' in os.environ['FLAGSCALE_STATUS_DIR'];"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "time.sleep(600 if first else 2); sys.exit(3)"
    )
    two_hosts.start({"stop_grace": 0.5}, command=[sys.executable, "-c", program])
    assert two_hosts.wait_for_exit_codes() == [1, 3]
    failure = two_hosts[0].exit_record()["failure"]
    assert (failure["host"], failure["exit_code"]) == ("h1", 3)


def test_unauthenticated_peers_at_the_port_are_ignored(two_hosts: AgentHosts) -> None:
    two_hosts.start(light=True)
    two_hosts.wait_until_joined()
    peers = []
    for data in (b"", b"GET / HTTP/1.1\r\n\r\n", MAGIC + bytes(64), MAGIC + os.urandom(5000)):
        peer = socket.create_connection(("127.0.0.1", two_hosts.port))
        peer.sendall(data)
        peers.append(peer)
    for _ in range(200):
        peers.append(socket.create_connection(("127.0.0.1", two_hosts.port)))
    time.sleep(1)
    # Nothing but the nonces is sent: a peer without the secret is disconnected.
    for peer in peers[:4]:
        with suppress(ConnectionResetError):
            reply = peer.recv(1000)
            assert reply == b"" or (reply.startswith(MAGIC) and len(reply) == len(MAGIC) + 32)
    for peer in peers:
        peer.close()
    assert [station.agent.poll() for station in two_hosts.hosts] == [None, None]
    wait_for(lambda: two_hosts.job_summary()["hosts"] == {"0": "running", "1": "running"})
    two_hosts[0].agent.terminate()
    two_hosts.wait_for_exit_codes()


def test_agents_with_different_secrets_do_not_connect(two_hosts: AgentHosts) -> None:
    """Each considers the other lost, and reports its place."""
    two_hosts.separate_secrets = True
    positions = {"places": ["0 stage 0", "1 stage 1"], "master_place": "stage 0"}
    two_hosts.start({"start_timeout": 3.0, **positions}, command=["sleep", "60"])
    assert two_hosts.wait_for_exit_codes() == [1, 1]
    first_failure, second_failure = (
        two_hosts[number].exit_record()["failure"] for number in (0, 1)
    )
    assert (first_failure["host"], second_failure["host"]) == ("h1", "h0")
    assert "did not report within 3 s of the start" in first_failure["reason"]
    assert "was not reached within 3 s of the start" in second_failure["reason"]
    assert first_failure["reason"].endswith("; it held stage 1")
    assert second_failure["reason"].endswith("; it held stage 0")
    two_hosts.wait_until_ended(1)


def test_the_secret_is_in_no_argument_no_log_and_no_rank(two_hosts: AgentHosts) -> None:
    two_hosts.start(light=True)
    two_hosts.wait_until_joined()
    for station in two_hosts.hosts:
        for process in station.run_processes():
            command_line = Path(f"/proc/{process.pid}/cmdline").read_bytes()
            assert two_hosts.secret.encode() not in command_line
            if process.pid != station.agent.pid:
                assert (
                    two_hosts.secret.encode()
                    not in processes.read_environment(process.pid).values()
                )
    # The ranks share a secret of their own, which appears nowhere else.
    (of_ranks,) = {
        processes.read_environment(s.rank_pid()).get(b"FSCCL_SECRET") for s in two_hosts.hosts
    }
    assert of_ranks is not None
    assert re.fullmatch(b"[0-9a-f]{32}", of_ranks)
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            assert of_ranks not in line.read_bytes()
    two_hosts[0].agent.terminate()
    two_hosts.wait_for_exit_codes()
    for path in two_hosts.root.rglob("*"):
        assert path.is_dir() or of_ranks not in path.read_bytes()
        if path.is_file() and two_hosts.secret in path.read_text(errors="replace"):
            assert path.name == "secret"
            assert path.stat().st_mode & 0o777 == 0o600


def test_one_host_restarts_by_itself(one_host: AgentHosts) -> None:
    one_host.start({"max_restarts": 1}, TOY_0_0="exit", TOY_0_1="raise")
    assert one_host.wait_for_exit_codes() == [1]
    failure = one_host[0].exit_record()["failure"]
    assert failure["reason"] == "failed: ValueError: bad data in shard 7 (exit code 1)"
    restart = one_host.job_summary()["restarts"][0]["failure"]
    assert (restart["rank"], restart["exit_code"]) == (0, 3)
    assert one_host[0].exit_record()["attempt"] == 2


def test_job_that_never_joined_is_not_restarted(one_host: AgentHosts) -> None:
    one_host.start({"max_restarts": 5}, light=True, TOY_0_0="early")
    assert one_host.wait_for_exit_codes() == [5]
    assert one_host[0].exit_record()["attempt"] == 1
    assert one_host[0].exit_record()["failure"]["exit_code"] == 5
    expected = "flagscale: the job does not start again: its ranks never joined\n"
    assert one_host[0].read_output().count(expected) == 1


def test_rank_that_leaves_a_collective_is_logged_and_explains_the_hang(
    two_hosts: AgentHosts,
) -> None:
    two_hosts.start(
        {"hang_detection_timeout": 14.0},
        light=True,
        TOY_1_0="leave",
        TOY_0_0="patient",
    )
    assert two_hosts.wait_for_exit_codes() == [1, 0]
    failure = two_hosts[0].exit_record()["failure"]
    assert (failure["host"], failure["rank"]) == ("h0", 0)
    exit_text = r"rank 1 ended with exit code 0 at \d\d:\d\d:\d\d"
    assert re.search(f"^stalled: .*\nbefore that, {exit_text}$", failure["reason"])
    line = f"^flagscale: {exit_text} while 1 rank is still running$"
    assert len(re.findall(line, two_hosts[0].read_output(), re.MULTILINE)) == 1


LEAVING_RANKS = """
import os, signal, sys, time
rank, others = int(os.environ["RANK"]), [int(n) for n in sys.argv[1].split(",")]
if rank in others:
    if sys.argv[2] == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(float(sys.argv[2]))
    sys.exit(0)
time.sleep(600)
"""
RANKS = ["--nnodes", "1", "--node_rank", "0", "--nproc_per_node", "3", "--redirects", "3"]
RANKS += ["--rdzv_id", "x", "--master_addr", "127.0.0.1"]
TORCHRUN = ["-m", "torch.distributed.run", *RANKS]
COMMAND = [*python_arguments("flagscale.launcher.rank_processes"), *RANKS, "--first_rank", "0"]
COMMAND += ["--world_size", "3", "--tee", "0", "--stop_grace", "600"]
LEAVERS = {
    "torchrun": (TORCHRUN, [], "1", "3", "rank 1 ended with exit code 0 at .* while 2 ranks are"),
    "torchrun-at-once": (TORCHRUN, [], "1", "0", "rank 1 ended with exit code 0 at .* while 2 "),
    "several": (TORCHRUN, [], "0,2", "3", r"ranks? (0|2|0 and 2) ended with .* while 1 rank is"),
    "command": (COMMAND, ["--"], "2", "3", "rank 2 ended with exit code 0 at .* while 2 ranks are"),
}
TERMINATED = "terminated"


def start_leaving_ranks(
    host: AgentHosts, starter: list[str], separator: list[str], leavers: str, behavior: str
) -> None:
    """Start three ranks on one host, of which the leavers end."""
    program = host.root / "leaving.py"
    program.write_text(LEAVING_RANKS)
    files = ["--master_port", str(free_port()), "--log_dir", str(host.root / "h0" / "ranks")]
    python = [sys.executable] if separator else []
    words = [sys.executable, *starter, *files, *separator, *python, str(program)]
    host.start({"nproc": 3, "stop_grace": 600.0}, command=[*words, leavers, behavior])


@pytest.fixture(scope="module")
def leaving_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, AgentHosts]]:
    """A run of one host for each test below, started together: each waits for ten seconds."""
    with ExitStack() as stack:
        hosts = {
            name: stack.enter_context(agent_hosts(tmp_path_factory.mktemp(name), 1))
            for name in (*LEAVERS, TERMINATED)
        }
        for name, (starter, separator, leavers, seconds, _) in LEAVERS.items():
            start_leaving_ranks(hosts[name], starter, separator, leavers, seconds)
        start_leaving_ranks(hosts[TERMINATED], COMMAND, ["--"], "1", "term")
        yield hosts


@pytest.mark.parametrize("name", LEAVERS)
def test_ranks_that_end_alone_are_logged_once(
    leaving_hosts: dict[str, AgentHosts], name: str
) -> None:
    one_host = leaving_hosts[name]
    _, _, leavers, _, expected = LEAVERS[name]
    wait_for(lambda: re.search(expected, one_host[0].read_output()))
    wait_for(lambda: re.search(expected, one_host.job_summary()["early_exit"]))
    (rank, *_) = (
        process
        for rank, process in processes.find_ranks(one_host[0].run_processes()).items()
        if str(rank) not in leavers.split(",")
    )
    os.kill(rank.pid, signal.SIGKILL)
    one_host.wait_for_exit_codes()
    failure = one_host[0].exit_record()["failure"]
    assert failure["exit_code"] == -9
    assert re.search(r"\nbefore that, ranks? .* ended with exit code 0 ", failure["reason"])
    assert len(re.findall(expected, one_host[0].read_output())) == 1


def test_terminated_rank_of_a_command_did_not_end_with_exit_code_0(
    leaving_hosts: dict[str, AgentHosts],
) -> None:
    """The others have the grace period to save, in which the command still runs."""
    one_host = leaving_hosts[TERMINATED]
    exit_file = one_host.root / "h0" / "status" / "rank_1.exit"
    wait_for(exit_file.exists)
    time.sleep(max(exit_file.stat().st_mtime + 12 - time.time(), 0))
    assert "ended with exit code" not in one_host[0].read_output()
    assert one_host.job_summary()["early_exit"] == ""
    assert one_host[0].agent.poll() is None
    one_host[0].agent.terminate()
    one_host.wait_for_exit_codes()
