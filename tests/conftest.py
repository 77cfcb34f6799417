"""Configuration of all tests: plug-ins, signals, state directory and hypothesis."""

import atexit
import os
import shutil
import signal
import sys
import tempfile

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["support.needs", "bed.plugin"]

# A shell starts background commands with SIGINT ignored, and nohup with SIGHUP ignored. Programs
# that tests start would inherit an ignored signal, but they do not inherit a handler.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

# Keep the runs of tests out of the user's list of runs.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="flagscale-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

# On a busy machine the generation of examples may be slow, which is not an error of the tested
# code. CI tries the same examples each time, so that no change fails for the error of another one;
# elsewhere each run tries new ones.
settings.register_profile(
    "steady",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=os.environ.get("FLAGSCALE_SAME_EXAMPLES") == "1",
)
settings.load_profile("steady")


def pytest_runtest_setup() -> None:
    """Let torch compute in one thread, as the workers of the test run are more than the cores.

    Threads that wait for each other by spinning take the cores from the other workers.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() > 1:
        torch.set_num_threads(1)


LONGEST_FILES = ("test_layouts.py", "test_checkpoints.py", "test_slurm_runs.py", "test_agents.py")
"""Files that take minutes each, longest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the longest files start first, so that no worker is left with one at the end."""
    ranks = {name: number for number, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: ranks.get(item.path.name, len(ranks)))
