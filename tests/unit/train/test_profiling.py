"""Classification of kernels, and the vendor profiler's range."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import partial

import pytest
import torch

from flagscale.accelerators.cpu import Cpu
from flagscale.errors import ConfigError
from flagscale.train.device import Device
from flagscale.train.profiling import Profiler, classify_kernel, summarize_kernels

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("kernel", "category"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "GEMM"),
        ("nvjet_sm90_qrtst_128x160_128x5_2x1_v_bz_coopA_algo2_TNT", "8-bit GEMM"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
        ("void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "attention"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "communication"),
        ("triton_poi_fused__scaled_mm__to_copy_clamp", "compiled"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer and norm"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("void at::native::reduce_kernel<128, 4>", "other"),
    ],
)
def test_kernel_has_the_category_of_its_name(kernel: str, category: str) -> None:
    assert classify_kernel(kernel) == category


def test_summary_is_per_step() -> None:
    lines = list(
        summarize_kernels({"nvjet_sm90_tst": 6.0, "triton_poi": 2.0, "Memset": 0.0}, steps=2)
    )
    assert lines[0] == "4.0 ms of kernels per step"
    assert lines[1].split() == ["GEMM", "3.0", "ms", "75.0", "%"]
    assert lines[-3].split() == ["3.00", "ms", "nvjet_sm90_tst"]


def create_profiler(accelerator: Cpu) -> Profiler:
    args = Namespace(
        profile=True, profile_ranks=None, profile_step_start=2, profile_step_end=4,
        use_pytorch_profiler=False, profile_dir=None, tensorboard_dir=None,
    )  # fmt: skip
    return Profiler(args, 0, Device(accelerator, torch.device("cpu")), print)


def test_profiled_steps_are_a_range_of_the_vendors_profiler() -> None:
    marks: list[str] = []

    class AcceleratorWithRanges(Cpu):
        def profiler_range(self) -> tuple[Callable[[], None], Callable[[], None]]:
            return partial(marks.append, "begin"), partial(marks.append, "end")

    profiler = create_profiler(AcceleratorWithRanges())
    for step in range(1, 6):
        profiler.before_step(step)
        marks.append(f"step {step}")
        profiler.after_step(step)
    assert marks == ["step 1", "begin", "step 2", "step 3", "end", "step 4", "step 5"]


def test_range_without_a_vendor_profiler_is_an_error() -> None:
    with pytest.raises(ConfigError, match="which is not supported for the CPU of this rank"):
        create_profiler(Cpu()).before_step(2)
