"""Changes of arguments that save memory, and the sentence about a rank that runs out of it."""

from __future__ import annotations

from typing import Any

import pytest
from unit.estimate.test_memory import VOCABULARY, WHOLE, forecast_llama, llama_arguments

from flagscale.estimate import changes
from flagscale.estimate.changes import Saving, change_arguments, list_savings
from flagscale.estimate.op_times import DevicePeaks

GIB = 2**30


def test_savings_are_differences_of_estimates() -> None:
    options = f"{WHOLE} --micro-batch-size 2 --transformer-impl compiled"
    savings = list_savings(llama_arguments(options, 8), VOCABULARY, 0)
    before = forecast_llama(options, 8).stages[0].memory.total
    expected = {
        "recompute_granularity: full": "--recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
        "recompute_granularity: selective and recompute_modules: [layernorm, mlp]": "--recompute-"
        "granularity selective --recompute-modules layernorm mlp",
        "data_parallel_sharding_strategy: optim_grads": "--use-distributed-optimizer "
        "--data-parallel-sharding-strategy optim_grads",
        "micro_batch_size: 1": "--micro-batch-size 1",
        "tensor_model_parallel_size: 2": "--tensor-model-parallel-size 2 --sequence-parallel",
    }
    assert {saving.change for saving in savings} == set(expected)
    for saving in savings:
        after = forecast_llama(f"{options} {expected[saving.change]}", 8).stages[0].memory.total
        assert saving.bytes_saved == pytest.approx(before - after)
    assert savings == sorted(savings, key=lambda saving: -saving.bytes_saved)


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        ("--transformer-impl compiled --device cuda", 8),
        ("--transformer-impl compiled --device cuda --recompute-granularity selective "
         "--recompute-modules layernorm mlp", 26),
        ("--cpu-offloading-num-layers 2", None),
        ("--recompute-granularity auto", None),
    ],
    ids=["everything-kept", "mlp-recomputed", "offloaded", "whole-layers-recomputed"],
)  # fmt: skip
def test_as_many_layers_are_offloaded_as_take_no_time(options: str, layers: int | None) -> None:
    savings = list_savings(llama_arguments(f"{WHOLE} {options}"), VOCABULARY, 0)
    offloads = [saving for saving in savings if saving.change.startswith("cpu_offloading")]
    if layers is None:
        assert offloads == []
        return
    assert [saving.change for saving in offloads] == [f"cpu_offloading_num_layers: {layers}"]
    offloaded = f"{WHOLE} {options} --cpu-offloading-num-layers {layers}"
    device = DevicePeaks(989e12, 3.35e12)
    seconds = [forecast_llama(more).simulate([device]).seconds
               for more in (f"{WHOLE} {options}", offloaded)]  # fmt: skip
    assert seconds[0] == seconds[1]


@pytest.mark.parametrize(
    ("options", "absent"),
    [
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
         "recompute_granularity"),
        ("--micro-batch-size 1", "micro_batch_size"),
        ("--use-distributed-optimizer", "use_distributed_optimizer"),
    ],
    ids=["recomputed", "one-sequence", "sharded"],
)  # fmt: skip
def test_what_is_set_already_is_not_suggested(options: str, absent: str) -> None:
    savings = list_savings(llama_arguments(f"{WHOLE} {options}", 8), VOCABULARY, None)
    assert savings
    assert not any(saving.change.startswith(absent) for saving in savings)


def test_changes_that_save_almost_nothing_are_not_suggested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(changes, "possible_changes", lambda _: [{"micro_batch_size": 1}])
    assert list_savings(llama_arguments(WHOLE), VOCABULARY, 0) == []


@pytest.mark.parametrize(("tp", "changed_tp", "dp"), [(4, 8, 2), (2, 4, 4), (1, 2, 8)])
def test_changed_tensor_parallelism_keeps_the_ranks(tp: int, changed_tp: int, dp: int) -> None:
    args = llama_arguments(f"{WHOLE} --tensor-model-parallel-size {tp}", 16)
    changed = change_arguments(args, {"tensor_model_parallel_size": changed_tp})
    assert changed.data_parallel_size == dp


@pytest.mark.parametrize(
    ("size", "text"),
    [(12.4 * GIB, "12 GiB"), (2.26 * GIB, "2.3 GiB"), (GIB / 2, "512 MiB")],
)
def test_saving_is_rounded(size: float, text: str) -> None:
    assert str(Saving("a: 1", size)) == f"a: 1 saves about {text}"


TORCH_MESSAGE = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB of "
    "which 5.04 GiB is free. Including non-PyTorch memory, this process has 74.07 GiB memory in "
    "use. Of the allocated memory 72.00 GiB is allocated by PyTorch."
)


@pytest.mark.parametrize(
    ("message", "step", "expected"),
    [
        (
            TORCH_MESSAGE,
            1,
            "CUDA out of memory on rank 3 in step 1: tried to allocate 20.00 GiB, 5.04 GiB of "
            "79.11 GiB free; ",
        ),
        ("no memory", None, "CUDA out of memory on rank 3 before the first step; "),
    ],
    ids=["torch", "another"],
)
def test_sentence_has_the_changes_that_save_the_most(
    message: str, step: int | None, expected: str
) -> None:
    pytest.importorskip("torch")
    from flagscale.train.out_of_memory import explain_out_of_memory

    args = llama_arguments(WHOLE, 8)
    options: dict[str, Any] = {"device": "CUDA", "rank": 3, "step": step, "stage_index": 0}
    text = explain_out_of_memory(message, args, **options)
    savings = list_savings(args, VOCABULARY, 0)
    assert text == expected + "; ".join(map(str, savings))
    args.family = "no-such-family"
    assert explain_out_of_memory(message, args, **options) == (
        f"{expected}`flagscale estimate` shows what takes the memory"
    )
