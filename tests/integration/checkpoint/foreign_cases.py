"""Cases for checkpoint_worker.py that start from Hugging Face models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from support.unsharded import count_unsharded_weights, unsharded_parameters


def start_and_compare(run: Any) -> dict[str, Any]:
    """Load a model, compare its logits with a reference, and save it.

    The model is ``--pretrained-checkpoint``, or a checkpoint with ``load``. Logits are compared if
    the file ``reference`` exists. The checkpoint is saved with ``save``.
    """
    import torch

    from flagscale.train.checkpoint.formats.pretrained import load_pretrained

    if run.args.load:
        run.load()
    if run.rank == 1 and "path_of_rank_1" in run.case:
        run.args.pretrained_checkpoint = run.case["path_of_rank_1"]
    note, most_unsharded_weights = "", 0
    if run.args.pretrained_checkpoint:
        with measure_unsharded_weights(run) as counts:
            note = load_pretrained(run.args, run.state)
        most_unsharded_weights = max(counts)
    parameters = [parameter for module in run.state.modules() for parameter in module.parameters()]
    with unsharded_parameters(run.args, run.state.chunks):
        assert all(parameter.isfinite().all() for parameter in parameters), (
            "weights were left as they were"
        )
    max_difference = None
    if reference := run.case.get("reference"):
        expected = torch.load(reference)
        actual = compute_logits(run, torch.tensor(run.case["tokens"]))
        if actual is not None:
            max_difference = float((actual[..., : expected.shape[-1]] - expected).abs().max())
    if run.args.save:
        run.save(required=True)
    run.checkpointer.close()
    return {
        "note": note,
        "max_difference": max_difference,
        "report": run.report,
        "most_unsharded_weights": most_unsharded_weights,
        "embedding_weights": parameters[0].numel(),
        "weights": sum(parameter.numel() for parameter in parameters),
    }


@contextmanager
def measure_unsharded_weights(run: Any) -> Iterator[list[int]]:
    """Return a context manager that counts unsharded weights in memory at each copy to a tensor."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    counts = [0]

    class CopyObserver(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if function is torch.ops.aten.copy_.default:
                counts.append(count_unsharded_weights(run.state.chunks))
            return function(*args, **(kwargs or {}))

    with CopyObserver():
        yield counts


def compute_logits(run: Any, ids: Any) -> Any:
    """Return logits ``[1, sequence, padded vocabulary]`` on ranks of the last stage, else None."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    (model,) = run.state.modules()
    model.eval()
    previous_rank, next_rank = (
        getattr(parallel_state, f"get_pipeline_model_parallel_{which}_rank")()
        for which in ("prev", "next")
    )
    with torch.no_grad():
        if not model.pre_process:
            hidden = torch.empty(ids.shape[1], 1, run.config.hidden_size)
            dist.recv(hidden, previous_rank)
            model.set_input_tensor(hidden)
        outputs = model(ids, torch.arange(ids.shape[1])[None], None)
        if not model.post_process:
            dist.send(outputs.contiguous(), next_rank)
            return None
        group = parallel_state.get_tensor_model_parallel_group()
        shards = [torch.empty_like(outputs) for _ in range(group.size())]
        dist.all_gather(shards, outputs.contiguous(), group=group)
    return torch.cat(shards, dim=-1)
