"""``experiment.runner.slurm``: its options, and hints for rejected values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from flagscale.config.checks import experiment_notes
from flagscale.config.documented import documented_fields
from flagscale.config.slurm_schema import (
    EXTRA_SBATCH_OPTIONS,
    REFUSED_SBATCH_OPTIONS,
    Container,
    Slurm,
    parse_time_limit,
)
from flagscale.errors import ConfigError

if TYPE_CHECKING:
    from conftest import Workspace


def set_slurm_section(workspace: Workspace, text: str, runner: str = "") -> None:
    workspace.replace(
        "conf/train.yaml", "    nnodes: 1\n", f"    type: slurm\n    slurm: {text}\n{runner}"
    )


def test_slurm_section_is_loaded(workspace: Workspace) -> None:
    set_slurm_section(
        workspace,
        "{partition: 'gpu,long', time: 2:00:00, nodes: 2, gpus_per_node: h100:8, requeue: 3, "
        "exclusive: false, extra: {hold: true, mail-type: END, licenses: 'a b$c', nice: null}}",
    )
    runner = workspace.load().runner
    assert runner.nnodes == 2
    assert runner.slurm == Slurm(
        partition="gpu,long",
        time="2:00:00",
        nodes=2,
        gpus_per_node="h100:8",
        requeue=3,
        exclusive=False,
        extra={"hold": None, "mail_type": "END", "licenses": "a b$c"},
    )


def test_container_is_loaded(workspace: Workspace) -> None:
    set_slurm_section(workspace, "{container: {image: a.sif, runtime: apptainer, mounts: /data}}")
    override = "experiment.runner.slurm.container.options=[--nv]"
    assert workspace.load(override).runner.slurm.container == Container(
        image="a.sif", runtime="apptainer", mounts=("/data",), options=("--nv",)
    )


def test_slurm_options_can_be_overridden(workspace: Workspace) -> None:
    set_slurm_section(workspace, "{}")
    runner = workspace.load(
        "experiment.runner.slurm.time=1-12:00:00",
        "experiment.runner.slurm.extra.comment=a",
        "experiment.runner.slurm.extra.hold=true",
        "experiment.runner.nnodes=3",
    ).runner
    assert (runner.nnodes, runner.slurm.time) == (3, "1-12:00:00")
    assert runner.slurm.extra == {"comment": "a", "hold": None}
    per_type = "experiment.runner.slurm.device_type_specific={A:{nodes:1},B:{nodes:2}}"
    slurm = workspace.load("experiment.runner.slurm.extra={hold:true}", per_type).runner.slurm
    assert (slurm.extra, [*slurm.by_type]) == ({"hold": None}, ["A", "B"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(
            "{partion: x}", "slurm.partion: unknown key; did you mean 'partition'", id="typo"
        ),
        pytest.param(
            "{gpus: 8}", "give `gpus_per_node`: every node has the same number", id="gpus"
        ),
        pytest.param(
            "{extra: {job_nam: x}}",
            "sbatch would read it as an abbreviation of job_name",
            id="begun",
        ),
        pytest.param(
            "{extra: {part: x}}",
            "sbatch would read it as an abbreviation of partition",
            id="begun-key",
        ),
        pytest.param("{extra: {oversubscribe: true}}", "give `exclusive: false`", id="shared"),
        pytest.param("{dependency: 'after:1,singleton'}", "names are unique", id="singleton"),
        pytest.param("{array: 1-3}", "slurm.array: cannot be given: a run is one job", id="array"),
        pytest.param(
            "{licenses: a}", "other options of sbatch go to `extra`: {licenses", id="extra"
        ),
        pytest.param("{nodes: 0}", "from 1 to 65536, found 0", id="nodes"),
        pytest.param("{nodes: 65537}", "from 1 to 65536, found 65537", id="many-nodes"),
        pytest.param("{time: soon}", "expected minutes, h:mm:ss, d-hh", id="time"),
        pytest.param("{time: 1}", "not longer than the 90 s in which a job may save", id="short"),
        pytest.param("{gpus_per_node: all}", "such as h100:8, found 'all'", id="gpus-per-node"),
        pytest.param("{account: ''}", "expected a text, found an empty one", id="empty"),
        pytest.param('{account: "a\\nb"}', "cannot hold control characters", id="line"),
        pytest.param('{account: "a\\0b"}', "cannot hold a NUL character", id="nul"),
        pytest.param("{requeue: true}", "expected a whole number", id="requeue"),
        pytest.param("{extra: [a]}", "slurm.extra: expected a section", id="list"),
        pytest.param(
            "{extra: {licences: a}}",
            "no known option of sbatch; did you mean 'licenses'",
            id="extra-typo",
        ),
        pytest.param("{extra: {output: x}}", "`action=logs` shows it", id="output"),
        pytest.param("{extra: {qos: x}}", "write experiment.runner.slurm.qos", id="typed"),
        pytest.param(
            "{extra: {'--hold': true}}", "without the dashes, found '--hold'", id="dashes"
        ),
        pytest.param("{extra: {p: x}}", "the long name of an option", id="letter"),
        pytest.param("{extra: {comment: {a: 1}}}", "expected one value", id="map"),
        pytest.param("{extra: {comment: 'token=abc'}}", "looks like a secret", id="secret"),
        pytest.param(
            "{device_type_specific: {A: {nodes: 1, qos: x}}}", "A.qos: unknown key", id="of-type"
        ),
        pytest.param(
            "{device_type_specific: {A: {mem: 0}}}", "A.nodes: is required: without", id="type"
        ),
        pytest.param(
            "{nodes: 2, device_type_specific: {A: {nodes: 2}}}", "remove this one", id="both"
        ),
        pytest.param(
            "{requeue: 1, device_type_specific: {A: {nodes: 2}}}", "must be 0: Slurm", id="again"
        ),
        pytest.param("[]", "experiment.runner.slurm: expected a section", id="no-section"),
        pytest.param("{container: {}}", "container.image: is required", id="image"),
        pytest.param("{container: x.sif}", "container: expected a section", id="no-container"),
        pytest.param(
            "{container: {image: x, runtime: docker}}", "one of pyxis, apptainer", id="runtime"
        ),
        pytest.param(
            "{container: {image: x, mounts: [data]}}", "found 'data'", id="relative-mount"
        ),
        pytest.param("{container: {image: x, mounts: ['/a,/b']}}", "found '/a,/b'", id="mounts"),
        pytest.param("{container: {image: x, workdir: w}}", "an absolute path", id="workdir"),
        pytest.param(
            "{container: {image: x, options: [--pid]}}", "--pid hides the node's", id="pids"
        ),
        pytest.param(
            "{container: {image: 'docker://me:abc@host/x'}}", "looks like a secret", id="password"
        ),
        pytest.param("{extra: {container_image: x}}", "give `container`", id="pyxis"),
    ],
)
def test_invalid_slurm_option_is_rejected(workspace: Workspace, text: str, message: str) -> None:
    set_slurm_section(workspace, text)
    with pytest.raises(ConfigError) as error:
        workspace.load()
    assert message in str(error.value)
    assert "abc" not in str(error.value)


@pytest.mark.parametrize(
    ("runner", "message"),
    [
        pytest.param("    nnodes: 3\n", "is 2, and experiment.runner.nnodes is 3", id="nodes"),
        pytest.param("    nnodes: 99999\n", "Slurm has 65,536 nodes at most", id="many-nodes"),
        pytest.param("    no_shared_fs: true\n", "that its nodes share", id="files"),
        pytest.param("    stop_grace: 7200\n", "not longer than the 7230 s", id="grace"),
        pytest.param("    stop_grace: 1e5\n", "with Slurm at most 65,505 s", id="signal"),
    ],
)
def test_conflict_with_runner_is_rejected(workspace: Workspace, runner: str, message: str) -> None:
    set_slurm_section(workspace, "{nodes: 2, time: 2:00:00}", runner)
    with pytest.raises(ConfigError) as error:
        workspace.load()
    assert message in str(error.value)


def test_slurm_section_of_other_runner_is_noted(workspace: Workspace) -> None:
    set_slurm_section(workspace, "{nodes: 1}")
    notes = experiment_notes(workspace.load("experiment.runner.type=ssh"), 2)
    assert "experiment.runner.slurm has no effect without type: slurm" in notes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("30", 1800),
        ("2:30", 150),
        ("1:00:00", 3600),
        ("1-12", 129_600),
        ("1-0:30", 88_200),
        ("2-00:00:01", 172_801),
        ("UNLIMITED", None),
        ("infinite", None),
        ("0", None),
        ("0:00:00", None),
    ],
)
def test_time_limit_is_converted_to_seconds(text: str, expected: int | None) -> None:
    assert parse_time_limit(text) == expected


@pytest.mark.parametrize("text", ["", "1h", "1:2:3:4", "-3", "1-"])
def test_invalid_time_limit_is_rejected(text: str) -> None:
    with pytest.raises(ValueError):
        parse_time_limit(text)


def test_options_do_not_overlap() -> None:
    assert not set(documented_fields(Slurm)) & set(EXTRA_SBATCH_OPTIONS)
    assert not set(REFUSED_SBATCH_OPTIONS) & set(EXTRA_SBATCH_OPTIONS)
