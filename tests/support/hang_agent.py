"""One agent that starts a program which hangs, without the rest of the launcher."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from flagscale.module_command import python_arguments
from flagscale.status import RUN_ID_VARIABLE

PROJECT = Path(__file__).resolve().parents[2]


def read_explanation(directory: Path, kind: str, backend: str, ranks: int, port: int) -> str:
    """Start ``hang_program.py``, return the line that explains its hang, and end it.

    Returns:
        The whole output if there is no such line within a minute.
    """
    values = {"run_name": "hang", "run_dir": str(directory), "name": "here", "node_rank": 0}
    values |= {"first_rank": 0, "nproc": ranks, "stop_grace": 1.0, "max_restarts": 0}
    values |= {"on_failure": "stop", "lost_host_timeout": 60.0, "start_timeout": 600.0}
    values |= {"hang_detection_timeout": 4.0, "reports_status": False}
    starter = "--nnodes 1 --node_rank 0 --first_rank 0 --rdzv_id hang --master_addr 127.0.0.1 "
    starter += f"--master_port {port} --nproc_per_node {ranks} --world_size {ranks} --tee 0 "
    starter += f"--redirects 3 --stop_grace 1 --log_dir {directory / 'ranks'}"
    words = [sys.executable, *python_arguments("flagscale.launcher.agent")]
    words += ["--options", json.dumps(values), "--", sys.executable]
    words += [*python_arguments("flagscale.launcher.rank_processes"), *starter.split(), "--"]
    words += [sys.executable, str(PROJECT / "tests/support/hang_program.py"), kind, backend, "600"]
    path = os.pathsep.join((str(PROJECT / "flagscale/rank_hooks"), str(PROJECT)))
    environment = {**os.environ, "PYTHONPATH": path, RUN_ID_VARIABLE: f"hang-{port}"}
    environment |= {"FLAGSCALE_STATUS_DIR": str(directory / "status")}
    output = directory / "output"
    with output.open("wb") as file:
        agent = subprocess.Popen(words, env=environment, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and agent.poll() is None:
            match = re.search(r"^flagscale: (rank \d.*)$", output.read_text(), re.MULTILINE)
            if match is not None:
                return match[1]
            time.sleep(0.2)
    finally:
        agent.terminate()
        agent.wait(30)
    logs = (log.read_text()[-2000:] for log in directory.glob("ranks/*/*/*/stderr.log"))
    return "\n".join((output.read_text(), *logs))
