"""Tests of the adapters' bash code, checked and run by bash."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flagscale.accelerators import probes
from flagscale.accelerators.base import Accelerator
from flagscale.accelerators.registry import get_accelerator, list_device_accelerators

HOSTILE = ["0", "", "it's", "two words", "$HOME `id` $(id)", '"q"', "a\nb", "}", "naïve 🚀"]


def run_bash(program: str, **environment: str) -> str:
    result = subprocess.run(
        ["bash", "-uc", program], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stderr == ""
    return result.stdout


def test_unprobed_host_checks_every_kind() -> None:
    assert "\n".join(probes.default_variables_script()) == (
        "if [[ -e /proc/driver/nvidia/gpus ]] || command -v nvidia-smi >/dev/null; then\n"
        "    # No NVLink multicast: it is not safe on hosts that are shared with others.\n"
        '    export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}"\n'
        "    export TORCH_SYMM_MEM_DISABLE_MULTICAST="
        '"${TORCH_SYMM_MEM_DISABLE_MULTICAST:-1}"\n'
        "else\n"
        '    export TORCHDYNAMO_DISABLE="${TORCHDYNAMO_DISABLE:-1}"\n'
        "fi"
    )


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("user_value", [None, "the user's $own"], ids=["default", "user"])
def test_values_are_quoted_by_construction(value: str, user_value: str | None) -> None:
    lines = [*probes._iter_exports({"A_VALUE": value}), "printenv A_VALUE"]
    environment = {
        "PATH": "/usr/bin:/bin",
        **({} if user_value is None else {"A_VALUE": user_value}),
    }
    expected = value if user_value is None else user_value
    assert run_bash("\n".join(lines), **environment) == f"{expected}\n"


@pytest.mark.parametrize(
    ("devices", "names"),
    [
        pytest.param({}, {"TORCHDYNAMO_DISABLE"}, id="cpu"),
        pytest.param(
            {"cuda": 1}, {"NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST"}, id="cuda"
        ),
    ],
)
def test_defaults_follow_the_devices(devices: dict[str, int], names: set[str]) -> None:
    assert set(probes.default_variables(devices)) == names


def test_count_scripts_pass_shellcheck(tmp_path: Path) -> None:
    beside = Path(sys.executable).with_name("shellcheck")
    tool = str(beside) if beside.exists() else shutil.which("shellcheck")
    if tool is None:
        pytest.skip("shellcheck is not installed")
    head = "# shellcheck shell=bash disable=SC2034\n"
    for kind in list_device_accelerators():
        program = f'{kind.count_script}\nif {kind.presence_condition}; then echo "$count"; fi\n'
        (tmp_path / f"{kind.name}.sh").write_text(head + program)
    files = map(str, tmp_path.glob("*.sh"))
    result = subprocess.run([tool, *files], capture_output=True, text=True, check=False)
    assert result.stdout == ""


class Counted(Accelerator):
    name = "counted"


@pytest.mark.parametrize(
    ("count_script", "expected"),
    [
        pytest.param("devices=(/proc/self/fd/[012])\ncount=${#devices[@]}", 3, id="globs"),
        pytest.param("devices=(/no/such/*)\ncount=${#devices[@]}", 0, id="no-match"),
        pytest.param("echo noise\ncount=4", 4, id="noise"),
        pytest.param("", 0, id="nothing"),
        pytest.param("count=many", 0, id="no-number"),
        pytest.param("if then", 0, id="no-bash"),
        pytest.param("exit 3", 0, id="exits"),
    ],
)
def test_count_script_on_this_machine(count_script: str, expected: int) -> None:
    kind = Counted()
    kind.count_script = count_script
    assert kind.count_devices() == expected


def test_cuda_count_methods_agree() -> None:
    cuda = get_accelerator("cuda")
    assert cuda.count_devices() == Accelerator.count_devices(cuda)


# The driver's information file of a GPU.
INFORMATION = """\
Model: \t\t NVIDIA H100 80GB HBM3
IRQ:   \t\t 257
GPU UUID: \t GPU-5a1c0000-0000-0000-0000-000000000000
Bus Type: \t PCIe
"""


@pytest.mark.parametrize(
    ("text", "product"), [(INFORMATION, "NVIDIA H100 80GB HBM3"), ("", ""), (None, "")]
)
def test_product_name_from_the_driver(tmp_path: Path, text: str | None, product: str) -> None:
    for bus in ("0000:0f:00.0", "0000:2d:00.0"):
        (tmp_path / bus).mkdir()
        if text is not None:
            (tmp_path / bus / "information").write_text(text)
    count_script = get_accelerator("cuda").count_script.replace(
        "/proc/driver/nvidia/gpus", str(tmp_path)
    )
    program = f'shopt -s nullglob\ncount=0 product=\n{count_script}\necho "$count,$product"'
    assert run_bash(program, PATH="/usr/bin:/bin") == f"2,{product}\n"
