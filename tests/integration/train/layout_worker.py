"""Trains the same tiny model in many parallel layouts and writes down loss and gradient norm.

usage: layout_worker.py CASES.json RESULTS.json [cpu | cuda]

CASES is a list of {"id", "world", "argv", "backend", "clusters", "overflow", "graphs"}; the last
four may be missing. "overflow" is [rank, step]: a gradient of that rank is infinite in that step.
"graphs": layers are compiled as far as graphs go.
Importing torch and megatron.core takes longer than the training, so on a CPU this process imports
once and forks the ranks; cases of one world size and backend share their ranks, which lay the
process groups out anew for each. "clusters" is fsccl's way to divide ranks by hand.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.forked_ranks import Record, forget_layout, run_world


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text())
    results: dict[str, Any] = {}
    kind = sys.argv[3] if len(sys.argv) > 3 else "cpu"
    os.environ["FLAGSCALE_DEVICE"] = kind
    if kind == "cpu":
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    warnings.filterwarnings("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    if kind == "cpu":
        # So that the forked ranks need not. On a GPU the import starts CUDA, which cannot be used
        # after a fork.
        import torch._dynamo.exc  # noqa: F401

    for shared in sorted({setting(case) for case in cases}):
        own = [case for case in cases if setting(case) == shared]
        world, backend, clusters, _ = shared
        results.update(run_world(world, partial(run_rank, own, backend, clusters)))
        Path(sys.argv[2]).write_text(json.dumps(results))


def setting(case: dict[str, Any]) -> tuple[int, str, str, bool]:
    """World size, backend, clusters and graphs: what cases must have in common to share ranks."""
    graphs = bool(case.get("graphs"))
    return case["world"], case.get("backend", "auto"), case.get("clusters", ""), graphs


def run_rank(cases: list[dict[str, Any]], backend: str, clusters: str) -> Iterator[Record]:
    """The life of a rank."""
    if clusters:
        os.environ["FSCCL_CLUSTERS"] = clusters
    from flagscale.train import distributed
    from flagscale.train.device import choose

    rank = distributed.Rank.from_environment()
    device = choose("auto", rank.local_rank)
    distributed.join(rank, device, backend=backend, timeout_minutes=2)
    for case in cases:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = train(case, rank, device)
        said = {str(warning.message) for warning in caught}
        found["uncompiled"] = [text for text in said if "layers are not compiled" in text]
        yield case["id"], found
    distributed.leave()


def train(case: dict[str, Any], rank: Any, device: Any) -> dict[str, Any]:
    """Norm, and by name spread and mean, of the initial weights, losses and gradient norms of the
    steps, and the validation loss after them."""
    from flagscale.config.arguments.parser import parse_arguments
    from flagscale.config.arguments.resolve import of_rank, resolve
    from flagscale.train import distributed, recompute
    from flagscale.train.build import build_state, model_vocabulary, vocabulary_size
    from flagscale.train.data.datasets import build_data_iterators
    from flagscale.train.data.tokenizers import build_tokenizer
    from flagscale.train.layers.overlapped import hide_exchanges
    from flagscale.train.meshes.splitting import settle
    from flagscale.train.models.config import transformer_config
    from flagscale.train.models.initialize import global_parameters
    from flagscale.train.models.provider import parameters_of
    from flagscale.train.norms import parameters_norm
    from flagscale.train.readings import Readings
    from flagscale.train.step import Stepper, gathered

    args = of_rank(resolve(parse_arguments(case["argv"]), rank.world_size), rank.rank)
    groups = distributed.lay_out(args)
    tokenizer = build_tokenizer(args)
    size = vocabulary_size(args, tokenizer)
    args, groups = settle(args, groups, size, device, lambda line: None)
    vocabulary = model_vocabulary(args, tokenizer)
    recomputes = args.recompute_granularity in ("full", "auto")
    args = recompute.settle(args, vocabulary, device, lambda line: None)
    config = transformer_config(args, device)
    state = build_state(args, config, vocabulary, device)
    if args.tp_comm_overlap and device.is_host:  # which hides nothing, and computes the same
        for model in state.modules():
            hide_exchanges(model, device)
    if case.get("graphs"):
        compile_for_real(state.modules())
    by_hand = compute_by_hand(args, state, config, tokenizer)
    data = build_data_iterators(args, tokenizer, state.progress, chunks=len(state.chunks))
    weights = global_parameters(state.modules()[0], config)
    spread = {name: [float(weight.std()), float(weight.mean())] for name, weight in weights}
    norm = parameters_norm(state.chunks)
    stepper = Stepper(args, config, state, device, groups=groups)
    readings, scales, further = Readings(), [], list[float]()
    layers = Layers(state.modules()) if recomputes else None
    poisoned, at = case.get("overflow") or (None, None)
    for step in range(args.train_iters):
        with infinite_gradient(state.modules()[0], step == at and rank.rank == poisoned):
            readings.add(*stepper.train(data.train, stop=(False, False)))
        further += stepper.further.take().values()
        scales.append(float(state.optimizer.get_loss_scale()))
    found = list(readings.take(leave=0))
    routers = stepper.routers.take()
    with gathered(args, state.chunks):
        validation = stepper.evaluate(data.valid, 1)
    recomputed = everywhere(layers.counted) if layers else None
    scales = everywhere(scales) if args.fp16 else None
    forget_layout()
    return {
        "initial": spread,
        "weights": [norm],
        "by_hand": by_hand,
        "loss": [reading.loss for reading in found],
        "norm": [reading.grad_norm for reading in found],
        "validation": [validation],
        "routers": routers,
        "biases": [
            float(own.abs().max())
            for model in state.modules()
            for name, own in model.named_buffers()
            if name.endswith("expert_bias")
        ],
        "further": further,
        "own_weights": sum(p.numel() for p in parameters_of(state.chunks)),
        "vocabulary": vocabulary,
        "layers": [stage.layers for stage in args.meshes.stages] if args.meshes else None,
        "skipped": [reading.numbers.skipped for reading in found],
        "recomputed": recomputed,
        "scales": scales,
        "graphs": graphs_made() if case.get("graphs") else 0,
    }


def compile_for_real(models: list[Any]) -> None:
    """Compile the layers of these on a CPU, where nothing is compiled otherwise."""
    import torch

    from flagscale.train.layers.compiling import compile_layers

    # Of the case before nothing is left: a function has so many graphs at most.
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    os.environ["TORCHDYNAMO_DISABLE"] = "0"
    torch._dynamo.config.disable = False
    for model in models:
        compile_layers(model, backend="aot_eager")


def graphs_made() -> int:
    import torch

    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def everywhere(own: Any) -> list[Any]:
    """What each rank has."""
    import torch.distributed as dist

    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


@contextmanager
def infinite_gradient(model: Any, wanted: bool) -> Iterator[None]:
    """Where it is wanted, a context in which a weight's gradient is infinite."""
    if not wanted:
        yield
        return
    weight = model.decoder.layers[0].self_attention.linear_proj.weight
    hook = weight.register_hook(lambda gradient: gradient * float("inf"))
    yield
    hook.remove()


class Layers:
    """Watches the layers of a rank's model chunks run. ``counted`` has of each chunk, for every
    micro-batch, how many ran without a graph to be kept; and how many ran again, in all."""

    def __init__(self, models: list[Any]) -> None:
        from flagscale.train.models.initialize import blocks

        self.counted: list[dict[str, Any]] = []
        for model in models:
            found: dict[str, Any] = {"dropped": [], "again": 0}
            self.counted.append(found)
            (block,) = blocks(model).values()
            block.register_forward_pre_hook(partial(self._begins, found, len(block.layers)))
            for layer in block.layers:
                layer.register_forward_pre_hook(partial(self._runs, found))

    def _begins(self, found: dict[str, Any], layers: int, block: Any, _: Any) -> None:
        if block.training:
            found["dropped"].append(0)
            found["again"] -= layers

    def _runs(self, found: dict[str, Any], layer: Any, _: Any) -> None:
        import torch

        if layer.training:
            found["dropped"][-1] += not torch.is_grad_enabled()
            found["again"] += 1


def compute_by_hand(args: Any, state: Any, config: Any, tokenizer: Any) -> list[float] | None:
    """Loss and gradient norm of the first step, from the same weights and data by plain torch, and
    the losses of layers that predict further tokens; None where the rank holds only a part of the
    model."""
    import reference_bert
    import reference_llama
    import torch

    from flagscale.train.data.datasets import build_data_iterators
    from flagscale.train.models.initialize import global_parameters
    from flagscale.train.state import Progress

    known = {
        ("gpt", True, True): reference_llama.loss,
        ("bert", False, False): reference_bert.loss,
    }
    loss = known.get((args.family, args.swiglu, args.untie_embeddings_and_output_weights))
    simple = not (args.num_moe_experts or args.bf16 or args.fp16 or args.multi_latent_attention)
    simple = simple and not (args.window_size or args.sandwich_norm)
    simple = simple and (args.family == "bert" or args.position_embedding_type == "rope")
    if torch.distributed.get_world_size() > 1 or not simple or loss is None:
        return None
    bare = state.modules()[0]
    weights = {
        name: weight.detach().clone().requires_grad_(weight.requires_grad)
        for name, weight in global_parameters(bare, config)
    }
    data: Any = build_data_iterators(args, tokenizer, Progress()).train
    batches = [next(data) for _ in range(args.num_microbatches)]
    device = next(iter(weights.values())).device
    counts = [float(batch["loss_mask"].sum()) for batch in batches]
    # Of a micro-batch the mean, or a sum over all tokens of the step.
    shares = [count / sum(counts) for count in counts]
    if not args.calculate_per_token_loss:
        shares = [1 / len(batches)] * len(batches)
    batches = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches]
    mean = sum(
        share * loss(weights, batch, args) for share, batch in zip(shares, batches, strict=True)
    )
    added, further = predicted_by_hand(args, weights, batches)
    (mean + added).backward()
    trained = [weight for weight in weights.values() if weight.requires_grad]
    squares = [weight.grad.square().sum() for weight in trained]
    norm = float(torch.stack(squares).sum().sqrt())
    return [float(mean), norm, *further]


def predicted_by_hand(args: Any, weights: Any, batches: list[Any]) -> tuple[Any, list[float]]:
    """What layers that predict further tokens add to the loss, and the loss of each."""
    import reference_llama
    import torch

    if not args.mtp_num_layers:
        return 0.0, []
    ahead = torch.stack([reference_llama.further(weights, batch, args) for batch in batches])
    sums, counts = ahead.unbind(-1)
    # Of a micro-batch the mean, or a sum over all tokens that the head tells in the step.
    if args.calculate_per_token_loss:
        losses = sums.sum(0) / sum(float(batch["loss_mask"].sum()) for batch in batches)
    else:
        losses = (sums / counts).mean(0)
    told = (sums.sum(0) / counts.sum(0)).tolist()
    return args.mtp_loss_scaling_factor * losses.mean(), told


if __name__ == "__main__":
    main()
