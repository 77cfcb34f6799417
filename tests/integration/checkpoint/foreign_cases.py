"""Cases for checkpoint_worker.py that start from Hugging Face models."""

from __future__ import annotations

from typing import Any


def start_and_compare(run: Any) -> dict[str, Any]:
    """Load a model, compare its logits with a reference, and save it.

    The model is ``--pretrained-checkpoint``, or a checkpoint with ``load``. Logits are compared if
    the file ``reference`` exists. The checkpoint is saved with ``save``.
    """
    import torch

    from flagscale.train.checkpoint.formats.pretrained import load_pretrained

    if run.args.load:
        run.load()
    note = load_pretrained(run.args, run.state) if run.args.pretrained_checkpoint else ""
    parameters = [parameter for module in run.state.modules() for parameter in module.parameters()]
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
    return {"note": note, "max_difference": max_difference, "report": run.report}


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
