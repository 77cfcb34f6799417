"""Updates of lean optimizer states, compiled for a GPU, compared with the host's."""

from __future__ import annotations

import pytest
import torch

from flagscale.accelerators.device import Device
from flagscale.config.arguments.rules.optimizer_states import StateFormats
from flagscale.train.optim.lean_update import get_update
from flagscale.train.optim.master_adam import MasterWeightAdam

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FORMATS = {
    "fp32": StateFormats(),
    "remainders": StateFormats(remainders=True),
    "bf16": StateFormats("bf16", first_moment="bf16", second_moment="bf16"),
    "fp16": StateFormats(remainders=True, first_moment="fp16", second_moment="fp16"),
    "fp8": StateFormats("bf16", first_moment="fp8", second_moment="fp8", gradients="bf16"),
}
SIZES = (128, 5 * 128 + 17, (1 << 24) + 256, 7, (1 << 23) + 128)
"""The device updates some states of the large ones if all states are in host memory."""


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """torch limits the number of variants in which one function is compiled in a process."""
    torch._dynamo.reset()
    get_update.cache_clear()


def train(formats: StateFormats, device: str, fraction: float) -> list[torch.Tensor]:
    """Return the weights and moments after three steps, in host memory."""
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(size, generator=generator).bfloat16().to(device) for size in SIZES]
    adam = MasterWeightAdam(weights, formats=formats, offload_fraction=fraction, lr=1e-3)
    for _ in range(3):
        for tensor in weights:
            gradient = torch.randn(tensor.numel(), generator=generator)
            dtype = torch.bfloat16 if formats.gradients == "bf16" else torch.float32
            tensor.decoupled_grad = gradient.to(device, dtype)  # type: ignore[attr-defined]
        adam.step()
    names = ("master_param", "exp_avg", "exp_avg_sq")
    return [adam.get_unscaled_state(tensor, name).cpu() for tensor in weights for name in names]


@pytest.mark.parametrize(
    ("fraction", "is_pinned"),
    [(0.0, True), (1.0, True), (1.0, False)],
    ids=["device", "host", "host-by-its-cores"],
)
@pytest.mark.parametrize("formats", FORMATS.values(), ids=FORMATS)
@pytest.mark.filterwarnings("ignore:some of the host's memory cannot be pinned")
def test_compiled_update_equals_the_hosts(
    formats: StateFormats, fraction: float, is_pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the host's memory cannot be pinned, so that the device cannot update states there.

    A value that is computed with another rounding error may be rounded to the next number.

    torch's kernel for CUDA rounds ``1 - beta2`` to fp32, with an error of 5e-5.
    """
    if not is_pinned:
        monkeypatch.setattr(Device, "register_host_memory", lambda *_: False)
    for result, expected in zip(
        train(formats, "cuda", fraction), train(formats, "cpu", 0.0), strict=True
    ):
        is_close = torch.isclose(result, expected, rtol=1e-4, atol=1e-9)
        assert is_close.float().mean() > 0.99
        assert torch.allclose(result, expected, rtol=0.15, atol=1e-3)
