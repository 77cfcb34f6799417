"""Train a tiny model in many parallel layouts and write losses and gradient norms.

usage: layout_worker.py CASES.json RESULTS.json [cpu | cuda]

CASES is a list of {"id", "world", "argv", "backend", "clusters", "overflow", "graphs"}, of which
the last four are optional. "world" is the number of ranks. "overflow" is [rank, step]: a gradient
of that rank is infinite in that step. With "graphs", layers are traced and compiled. "clusters"
divides the ranks into nodes for fsccl (FSCCL_CLUSTERS).

Importing torch and megatron.core takes longer than training. On a CPU this process imports them
once and forks the ranks. Cases with equal world size and backend share their ranks, which create
the process groups of each case.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.forked_ranks import Record, reset_megatron_state, run_forked_ranks
from support.unsharded import count_unsharded_weights, unsharded_parameters


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text())
    results: dict[str, Any] = {}
    device_kind = sys.argv[3] if len(sys.argv) > 3 else "cpu"
    os.environ["FLAGSCALE_DEVICE"] = device_kind
    if device_kind == "cpu":
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    warnings.filterwarnings("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    if device_kind == "cpu":
        # Imported before the fork, so that the ranks share the modules. On a GPU the import would
        # initialize CUDA, which does not support fork.
        import torch._dynamo.exc  # noqa: F401

        import flagscale.train.build
        import flagscale.train.data.datasets
        import flagscale.train.step  # noqa: F401

        shorten_measurements()

    for settings in sorted({get_shared_settings(case) for case in cases}):
        group_cases = [case for case in cases if get_shared_settings(case) == settings]
        world, backend, clusters, _ = settings
        results.update(run_forked_ranks(world, partial(run_rank, group_cases, backend, clusters)))
        Path(sys.argv[2]).write_text(json.dumps(results))


def shorten_measurements() -> None:
    """Let an automatic split of layers measure its costs briefly.

    The results of a training must not depend on the split.
    """
    from flagscale.train.meshes import cost_profiler

    cost_profiler._CPU_ROUNDS = 1
    cost_profiler._FORWARD_BACKWARD_SECONDS = cost_profiler._SHORT_MEASUREMENT_SECONDS = 0.0


def get_shared_settings(case: dict[str, Any]) -> tuple[int, str, str, bool]:
    """Return world size, backend, clusters and graphs of a case.

    Cases with equal values run on the same ranks.
    """
    graphs = bool(case.get("graphs"))
    return case["world"], case.get("backend", "auto"), case.get("clusters", ""), graphs


def run_rank(cases: list[dict[str, Any]], backend: str, clusters: str) -> Iterator[Record]:
    """Run the cases on a rank and yield their names and results."""
    if clusters:
        os.environ["FSCCL_CLUSTERS"] = clusters
    from flagscale.train import distributed
    from flagscale.train.device import choose_device

    rank = distributed.RankIdentity.from_environment()
    device = choose_device("auto", rank.local_rank)
    distributed.init_default_group(rank, device, backend=backend, timeout_minutes=2)
    if cases[0].get("graphs"):
        select_masks_that_compile()
    for case in cases:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = train_case(case, rank, device)
        messages = {str(warning.message) for warning in caught}
        result["uncompiled"] = [text for text in messages if "layers are not compiled" in text]
        yield case["id"], result
    distributed.destroy_groups()


def train_case(case: dict[str, Any], rank: Any, device: Any) -> dict[str, Any]:
    """Train a case.

    Returns:
        Standard deviation and mean of the initial weights by name, their norm, losses and gradient
        norms of the steps, the validation loss, and other values that tests check.
    """
    from flagscale.config.arguments.derive import derive_arguments, rank_arguments
    from flagscale.config.arguments.spec.command_line import parse_arguments
    from flagscale.train import distributed, recompute
    from flagscale.train.build import build_state, padded_vocabulary_size, vocabulary_size
    from flagscale.train.data.datasets import build_data_iterators
    from flagscale.train.data.tokenizers import build_tokenizer
    from flagscale.train.deferred_metrics import DeferredMetrics
    from flagscale.train.layers.tp_comm_overlap import enable_overlap
    from flagscale.train.meshes.auto_layout import resolve_auto_layout
    from flagscale.train.models.config import build_transformer_config
    from flagscale.train.models.provider import list_parameters
    from flagscale.train.parameter_norm import compute_parameters_norm
    from flagscale.train.step import Stepper, gathered_parameters

    args = rank_arguments(
        derive_arguments(parse_arguments(case["argv"]), rank.world_size), rank.rank
    )
    groups = distributed.init_model_parallel(args)
    tokenizer = build_tokenizer(args)
    unpadded_vocabulary = vocabulary_size(args, tokenizer)
    args, groups = resolve_auto_layout(args, groups, unpadded_vocabulary, device, lambda line: None)
    vocabulary = padded_vocabulary_size(args, tokenizer)
    recomputes = args.recompute_granularity in ("full", "auto")
    args = recompute.resolve_auto_recompute(args, vocabulary, device, lambda line: None)
    config = build_transformer_config(args, device)
    state = build_state(args, config, vocabulary, device)
    # On a CPU nothing is overlapped, but the same operators run.
    if args.tp_comm_overlap and device.is_host:
        for model in state.modules():
            enable_overlap(model, device)
    if case.get("graphs"):
        compile_layers_on_cpu(state.modules())
    reference_values = compute_reference(args, state, config, tokenizer)
    data = build_data_iterators(args, tokenizer, state.progress, model_chunks=len(state.chunks))
    weight_statistics = compute_weight_statistics(args, state, config)
    initial_norm = compute_parameters_norm(state.chunks)
    stepper = Stepper(args, config, state, device, groups=groups)
    deferred_metrics, scales, mtp_losses = DeferredMetrics(), [], list[float]()
    layer_counter = LayerCounter(state.modules()) if recomputes else None
    activations = ActivationMeter(state.modules())
    gather_counter = GatherCounter(state.chunks[0])
    overflow_rank, overflow_step = case.get("overflow") or (None, None)
    for step in range(args.train_iters):
        with (
            infinite_gradient(
                state.modules()[0], (step, rank.rank) == (overflow_step, overflow_rank)
            ),
            activations.measure(),
        ):
            deferred_metrics.add(*stepper.train(data.train, stop_flags=(False, False)))
        mtp_losses += stepper.mtp_losses.pop_averages().values()
        scales.append(float(state.optimizer.get_loss_scale()))
    step_metrics = list(deferred_metrics.pop_completed(keep_newest=0))
    routers = stepper.router_losses.pop_averages()
    with gathered_parameters(args, state.chunks):
        evaluation = {
            "validation": [stepper.evaluate(data.valid, 1).loss],
            **score_sequences(args, config, state, device, unpadded_vocabulary),
        }
    recomputed = gather_from_ranks(layer_counter.counts) if layer_counter else None
    scales = gather_from_ranks(scales) if args.fp16 else None
    reset_megatron_state()
    return {
        "initial_statistics": weight_statistics,
        "weight_norm": [initial_norm],
        "torch_reference": reference_values,
        "loss": [metrics.loss for metrics in step_metrics],
        "norm": [metrics.grad_norm for metrics in step_metrics],
        **evaluation,
        "router_losses": routers,
        "expert_biases": [
            float(buffer.abs().max())
            for model in state.modules()
            for name, buffer in model.named_buffers()
            if name.endswith("expert_bias")
        ],
        "mtp_losses": mtp_losses,
        "weight_count": sum(p.numel() for p in list_parameters(state.chunks)),
        "embedding_gathers": gather_counter.count,
        "forward_passes": args.train_iters * args.num_microbatches,
        "failure_of_rank_1": describe_failure_of_rank_1(rank.rank, rank.world_size),
        "unsharded_weights": count_unsharded_weights(state.chunks),
        "vocabulary": vocabulary,
        "stage_layers": [stage.layers for stage in args.meshes.stages] if args.meshes else None,
        "skipped": [metrics.host.skip_reason for metrics in step_metrics],
        "recomputed": recomputed,
        "activation_bytes": activations.measured_bytes,
        "loss_scales": scales,
        "graphs": count_graphs() if case.get("graphs") else 0,
    }


def compute_weight_statistics(args: Any, state: Any, config: Any) -> dict[str, list[float]]:
    """Return standard deviation and mean of the weights by name.

    The access to sharded weights that follows ends with an exception, which must release them.
    """
    from flagscale.config.arguments.rules.sharding import shards_weights
    from flagscale.train.models.initialize import iter_global_parameters

    with unsharded_parameters(args, state.chunks):
        statistics = {
            name: [float(weight.std()), float(weight.mean())]
            for name, weight in iter_global_parameters(state.modules()[0], config)
        }
    for chunk in state.chunks if shards_weights(vars(args)) else ():
        count = count_unsharded_weights([chunk])
        for units in (chunk.iter_unsharded(), chunk.iter_writable()):
            with suppress(ZeroDivisionError), closing(units):
                for _ in units:
                    raise ZeroDivisionError
        assert count_unsharded_weights([chunk]) == count
    return statistics


def describe_failure_of_rank_1(rank: int, ranks: int) -> str | None:
    """Return what this rank reports if rank 1 fails alone; None if there is no other rank."""
    import torch.distributed as dist

    from flagscale.errors import JobError
    from flagscale.train.sharding.collectives import run_on_group

    def allocate() -> None:
        if rank == 1:
            raise RuntimeError("no memory left\nwith details")

    if ranks == 1:
        return None
    try:
        run_on_group(dist.group.WORLD, allocate, "allocate 8 bytes")
    except (JobError, RuntimeError) as error:
        return str(error)
    return None


class GatherCounter:
    """Counts how often the bucket of the embedding is gathered for training on this rank.

    ``count`` is None without an embedding or if weights are not sharded.
    """

    def __init__(self, chunk: Any) -> None:
        from flagscale.train.sharding.data_parallel import ShardedDataParallel
        from flagscale.train.state import unwrap_model

        self.count: int | None = None
        embedding = getattr(unwrap_model(chunk), "embedding", None)
        if embedding is None or not isinstance(chunk, ShardedDataParallel):
            return
        self.count = 0
        weight = embedding.word_embeddings.weight
        bucket: Any = next(b for b in chunk.iter_buckets() if weight in b.params)
        start_all_gather = bucket.start_all_gather

        def count_and_start() -> Any:
            self.count += chunk.training
            return start_all_gather()

        bucket.start_all_gather = count_and_start


def score_sequences(
    args: Any, config: Any, state: Any, device: Any, vocabulary: int
) -> dict[str, list[Any]]:
    """Return the log-likelihoods of sequences of several lengths, and the tokens that follow them.

    None of a model that does not predict text token by token, or whose layout is not supported.
    """
    from flagscale.train.evaluation.scoring import ScoredSequence, SequenceScorer

    if args.family == "bert" or args.meshes is not None:
        return {"scores": [], "next_tokens": []}
    scorer = SequenceScorer(args, config, state.chunks, device, vocabulary)
    sequences = [
        [(7 * index + 31 * length) % (vocabulary - 1) for index in range(length)]
        for length in (3, 8, 9, 17, scorer.max_length + 1)
    ]
    scores = scorer.score([ScoredSequence(tokens, len(tokens) // 2) for tokens in sequences])
    return {
        "scores": [score.log_likelihood for score in scores],
        "next_tokens": scorer.predict_next(
            [tokens[: scorer.max_length] for tokens in sequences[:-1]]
        ),
    }


def select_masks_that_compile() -> None:
    """Select document masks as for a device without a kernel for documents.

    A CPU attends to one document after another, which cannot be compiled.
    """
    from flagscale.train.models import document_mask

    select = document_mask.select_mask_form
    device: Any = SimpleNamespace(is_host=False, accelerator=SimpleNamespace(fused_attention=False))
    document_mask.select_mask_form = lambda config, _device: select(config, device)


def compile_layers_on_cpu(models: list[Any]) -> None:
    """Compile the layers on a CPU, where they are not compiled otherwise."""
    import torch

    from flagscale.train.layers.layer_compilation import compile_layers

    # Discard the graphs of the previous case: the number of graphs per function is limited.
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    os.environ["TORCHDYNAMO_DISABLE"] = "0"
    torch._dynamo.config.disable = False
    for model in models:
        compile_layers(model, backend="aot_eager")


def count_graphs() -> int:
    import torch

    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def gather_from_ranks(value: Any) -> list[Any]:
    """Return the values of all ranks."""
    import torch.distributed as dist

    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@contextmanager
def infinite_gradient(model: Any, enabled: bool) -> Iterator[None]:
    """Return a context manager in which the gradient of a weight is infinite, if ``enabled``."""
    if not enabled:
        yield
        return
    weight = model.decoder.layers[0].self_attention.linear_proj.weight
    hook = weight.register_hook(lambda gradient: gradient * float("inf"))
    yield
    hook.remove()


class ActivationMeter:
    """Measures the memory of the tensors that autograd keeps on the device for the first backward
    pass, without parameters and gradients.
    """

    def __init__(self, models: list[Any]) -> None:
        parameters = [parameter for model in models for parameter in model.parameters()]
        gradients = [getattr(parameter, "main_grad", None) for parameter in parameters]
        buffers = [tensor for tensor in (*parameters, *gradients) if tensor is not None]
        self._excluded = {tensor.untyped_storage().data_ptr() for tensor in buffers}
        self._tensors: list[Any] = []
        self.measured_bytes: int | None = None

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure within a step, unless the memory is known already."""
        import torch

        if self.measured_bytes is not None:
            yield
            return
        with torch.autograd.graph.saved_tensors_hooks(self._keep, self._add_up):
            yield

    def _keep(self, tensor: Any) -> Any:
        if self.measured_bytes is None:
            self._tensors.append(tensor)
        return tensor

    def _add_up(self, tensor: Any) -> Any:
        if self.measured_bytes is None:
            storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in self._tensors}
            sizes = [s.nbytes() for s in storages.values() if s.data_ptr() not in self._excluded]
            self.measured_bytes = sum(sizes)
            self._tensors.clear()
        return tensor


class LayerCounter:
    """Counts the forward passes of layers.

    ``counts`` has an entry per model chunk: "recomputed_per_micro_batch", the number of layers that
    ran without storing activations in each micro-batch, and "recomputed_total", the number of
    layers that ran again in the backward pass.
    """

    def __init__(self, models: list[Any]) -> None:
        from flagscale.train.models.initialize import find_transformer_blocks

        self.counts: list[dict[str, Any]] = []
        for model in models:
            chunk_counts: dict[str, Any] = {"recomputed_per_micro_batch": [], "recomputed_total": 0}
            self.counts.append(chunk_counts)
            (block,) = find_transformer_blocks(model).values()
            block.register_forward_pre_hook(
                partial(self._start_micro_batch, chunk_counts, len(block.layers))
            )
            for layer in block.layers:
                layer.register_forward_pre_hook(partial(self._count_layer, chunk_counts))

    def _start_micro_batch(
        self, chunk_counts: dict[str, Any], layers: int, block: Any, _: Any
    ) -> None:
        if block.training:
            chunk_counts["recomputed_per_micro_batch"].append(0)
            # The forward pass itself runs every layer once.
            chunk_counts["recomputed_total"] -= layers

    def _count_layer(self, chunk_counts: dict[str, Any], layer: Any, _: Any) -> None:
        import torch

        if layer.training:
            chunk_counts["recomputed_per_micro_batch"][-1] += not torch.is_grad_enabled()
            chunk_counts["recomputed_total"] += 1


def compute_reference(args: Any, state: Any, config: Any, tokenizer: Any) -> list[float] | None:
    """Return loss, gradient norm and MTP losses of the first step, computed without megatron.core.

    None if there is no reference implementation of the model, or the rank holds only a part of it.
    """
    import reference_bert
    import reference_llama
    import torch

    from flagscale.train.data.datasets import build_data_iterators
    from flagscale.train.models.initialize import iter_global_parameters
    from flagscale.train.state import Progress

    reference_losses = {
        ("gpt", True, True): reference_llama.loss,
        ("bert", False, False): reference_bert.loss,
    }
    compute_loss = reference_losses.get(
        (args.family, args.swiglu, args.untie_embeddings_and_output_weights)
    )
    has_reference = not (
        args.num_moe_experts or args.bf16 or args.fp16 or args.multi_latent_attention
    )
    has_reference = has_reference and not (args.window_size or args.sandwich_norm)
    has_reference = has_reference and (
        args.family == "bert" or args.position_embedding_type == "rope"
    )
    if torch.distributed.get_world_size() > 1 or not has_reference or compute_loss is None:
        return None
    model = state.modules()[0]
    weights = {
        name: weight.detach().clone().requires_grad_(weight.requires_grad)
        for name, weight in iter_global_parameters(model, config)
    }
    data: Any = build_data_iterators(args, tokenizer, Progress()).train
    batches = [next(data) for _ in range(args.num_microbatches)]
    device = next(iter(weights.values())).device
    counts = [float(batch["loss_mask"].sum()) for batch in batches]
    # Mean per micro-batch, or sum over all tokens of the step.
    batch_weights = [count / sum(counts) for count in counts]
    if not args.calculate_per_token_loss:
        batch_weights = [1 / len(batches)] * len(batches)
    batches = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches]
    mean_loss = sum(
        batch_weight * compute_loss(weights, batch, args)
        for batch_weight, batch in zip(batch_weights, batches, strict=True)
    )
    mtp_loss, layer_losses = compute_mtp_reference(args, weights, batches)
    (mean_loss + mtp_loss).backward()
    trained_weights = [weight for weight in weights.values() if weight.requires_grad]
    squares = [weight.grad.square().sum() for weight in trained_weights]
    norm = float(torch.stack(squares).sum().sqrt())
    return [float(mean_loss), norm, *layer_losses]


def compute_mtp_reference(args: Any, weights: Any, batches: list[Any]) -> tuple[Any, list[float]]:
    """Return the contribution of MTP layers to the loss, and the loss of each layer."""
    import reference_llama
    import torch

    if not args.mtp_num_layers:
        return 0.0, []
    sums_and_counts = torch.stack(
        [reference_llama.mtp_loss_sums(weights, batch, args) for batch in batches]
    )
    sums, counts = sums_and_counts.unbind(-1)
    # Mean per micro-batch, or sum divided by the tokens of the main loss in the step.
    if args.calculate_per_token_loss:
        losses = sums.sum(0) / sum(float(batch["loss_mask"].sum()) for batch in batches)
    else:
        losses = (sums / counts).mean(0)
    layer_losses = (sums.sum(0) / counts.sum(0)).tolist()
    return args.mtp_loss_scaling_factor * losses.mean(), layer_losses


if __name__ == "__main__":
    main()
