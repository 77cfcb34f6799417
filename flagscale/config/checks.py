"""What must hold between the values of an experiment, before anything starts.

Pure: nothing here looks at the machine. Every check yields problems whose key is the argument as
the YAML gives it. A foreign training program's own rules are its own; only what holds for any
Megatron (ranks and batches divide evenly) is checked for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flagscale.config.arguments.flatten import leaves
from flagscale.config.arguments.parser import fold
from flagscale.config.arguments.registry import arguments, registry
from flagscale.config.schema import Experiment
from flagscale.errors import Problem


@dataclass(frozen=True)
class Arguments:
    """The arguments of an experiment, aliases folded, defaults filled in."""

    given: Mapping[str, Any]
    keys: Mapping[str, str]
    """The dotted key that gave an argument; an alias has its own entry beside its target's."""
    written: Mapping[str, Any]
    """Values by the names that the YAML uses, aliases among them."""
    sources: Mapping[str, str]

    @classmethod
    def of(cls, experiment: Experiment) -> Arguments:
        """Arguments with a value that does not fit are left out; loading reports those."""
        given: dict[str, Any] = {}
        keys: dict[str, str] = {}
        written: dict[str, Any] = {}
        for path, name, value in leaves(experiment.train.sections(), "train."):
            try:
                folded = fold(name, value)
            except ValueError:
                continue
            written[name] = value
            keys[name] = path
            if folded is not None:
                given[folded[0]] = folded[1]
                keys[folded[0]] = path
        return cls(given, keys, written, experiment.sources)

    def __getitem__(self, name: str) -> Any:
        return self.given.get(name, arguments()[name].default)

    def problem(self, name: str, message: str) -> Problem:
        """A problem with an argument, at the place where it is given."""
        key = self.keys.get(name) or f"train.{registry()[name].section}.{name}"
        return Problem(key, message, self.sources.get(key))


def check_arguments(experiment: Experiment) -> list[Problem]:
    """Problems that do not depend on the number of ranks."""
    if experiment.task.foreign:
        return []
    args = Arguments.of(experiment)
    missing = list(_required(args))
    if missing:
        return missing
    checks = (_refused, _aliases, _tensor_parallel, _pipeline_parallel, _length, _experts, _data)
    return [problem for check in checks for problem in check(args)]


def check_world(experiment: Experiment, world_size: int) -> list[Problem]:
    """Problems of ``world_size`` ranks, as planned, with the layout and the batch sizes."""
    args = Arguments.of(experiment)
    tp, pp = args["tensor_model_parallel_size"], args["pipeline_model_parallel_size"]
    cp = args["context_parallel_size"]
    model = tp * pp * cp
    if world_size % model:
        sizes = f"tensor {tp} x pipeline {pp}" + (f" x context {cp}" if cp > 1 else "")
        name = "tensor_model_parallel_size" if tp > 1 else "pipeline_model_parallel_size"
        message = f"{sizes} = {model} ranks do not divide the {world_size} that will start"
        return [args.problem(name, message)]
    problems = list(_batches(args, world_size // model))
    if not experiment.task.foreign:
        problems += _expert_ranks(args, world_size)
    return problems


def notes(experiment: Experiment, world_size: int) -> list[str]:
    """What is worth saying about an experiment that is not wrong."""
    found = []
    if experiment.task.foreign:
        found.append(
            f"{experiment.task.entrypoint.name} is not this project's training program: its own "
            "parser judges the arguments"
        )
    args = Arguments.of(experiment)
    samples, batch = args["train_samples"], args["global_batch_size"]
    if batch is None and samples:
        model = args["tensor_model_parallel_size"] * args["pipeline_model_parallel_size"]
        batch = args["micro_batch_size"] * (world_size // (model * args["context_parallel_size"]))
    if samples and batch:
        steps, rest = divmod(samples, batch)
        text = f"{steps} steps: train_samples {samples} / global_batch_size {batch}"
        over = f" is not whole: the last {rest} samples are not used"
        found.append(text + (over if rest else ""))
    return found


def _required(args: Arguments) -> Iterator[Problem]:
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "lr"):
        if args[name] is None:
            yield args.problem(name, "is required")


def _refused(args: Arguments) -> Iterator[Problem]:
    if args["context_parallel_size"] > 1:
        yield args.problem(
            "context_parallel_size",
            f"{args['context_parallel_size']}: the attention here cannot split a sequence over "
            "ranks yet; use 1",
        )
    if args["transformer_impl"] != "local":
        yield args.problem(
            "transformer_impl",
            f"{args['transformer_impl']}: only `local` is built here; it needs no Transformer "
            "Engine and computes attention by torch's scaled_dot_product_attention",
        )
    if args["bf16"] and args["fp16"]:
        yield args.problem("fp16", "excludes bf16")


def _aliases(args: Arguments) -> Iterator[Problem]:
    """Megatron-LM's switches that say nothing by themselves must agree with what they stand by."""
    grouped, groups = args.written.get("group_query_attention"), args["num_query_groups"]
    if grouped is True and groups is None:
        yield args.problem("group_query_attention", "needs num_query_groups")
    elif grouped is False and groups is not None:
        message = f"false contradicts num_query_groups {groups}; remove one"
        yield args.problem("group_query_attention", message)
    learned = args["position_embedding_type"] == "learned_absolute"
    if args.written.get("no_position_embedding") is True and learned:
        message = "say which instead: `position_embedding_type: rope` or `none`"
        yield args.problem("no_position_embedding", message)


def _tensor_parallel(args: Arguments) -> Iterator[Problem]:
    tp, heads = args["tensor_model_parallel_size"], args["num_attention_heads"]
    groups, hidden = args["num_query_groups"], args["hidden_size"]
    if heads % tp:
        yield _indivisible(args, "num_attention_heads", "tensor_model_parallel_size", tp)
    if groups is not None:
        if heads % groups:
            yield args.problem("num_query_groups", f"{groups} does not divide {heads} heads")
        elif groups % tp:
            yield _indivisible(args, "num_query_groups", "tensor_model_parallel_size", tp)
    if args["kv_channels"] is None and hidden % heads:
        yield _indivisible(args, "hidden_size", "num_attention_heads", heads)
    if args["ffn_hidden_size"] is not None and args["ffn_hidden_size"] % tp:
        yield _indivisible(args, "ffn_hidden_size", "tensor_model_parallel_size", tp)
    if args["sequence_parallel"] and tp == 1:
        yield args.problem("sequence_parallel", "needs tensor_model_parallel_size above 1")
    elif args["sequence_parallel"] and args["seq_length"] % tp:
        yield _indivisible(args, "seq_length", "tensor_model_parallel_size", tp)


def _indivisible(args: Arguments, name: str, by: str, size: int) -> Problem:
    return args.problem(name, f"{args[name]} is not divisible by {by} {size}")


def virtual_chunks(args: Arguments) -> int | None:
    """Model chunks a pipeline rank holds, whichever of three arguments says so; None: one."""
    pp = args["pipeline_model_parallel_size"]
    layers = args["num_layers_per_virtual_pipeline_stage"]
    chunks = args["num_virtual_stages_per_pipeline_rank"]
    if layers is not None:
        chunks = args["num_layers"] // (pp * layers)
    chunks = chunks or args["virtual_pipeline_model_parallel_size"]
    return None if chunks in (None, 1) else int(chunks)


def _pipeline_parallel(args: Arguments) -> Iterator[Problem]:
    pp, per_stage = (
        args["pipeline_model_parallel_size"],
        args["num_layers_per_virtual_pipeline_stage"],
    )
    chunks = virtual_chunks(args)
    if per_stage is not None and args["num_layers"] % (pp * per_stage):
        by = f"{per_stage} x pipeline_model_parallel_size {pp}"
        message = f"{args['num_layers']} layers do not divide into {by}"
        yield args.problem("num_layers_per_virtual_pipeline_stage", message)
    elif args["pipeline_model_parallel_layout"] is None:
        yield from _layers(args, pp, chunks or 1)
    if chunks is None:
        return
    if pp == 1:
        message = f"{chunks} virtual stages need a pipeline of at least 2"
        yield args.problem("pipeline_model_parallel_size", message)
    reason = "stages that hold several model chunks would get each other's tensors"
    if args.given.get("overlap_p2p_comm") is False:
        yield args.problem("overlap_p2p_comm", f"must be true: otherwise {reason}")
    if args.given.get("batch_p2p_comm") is True:
        yield args.problem("batch_p2p_comm", f"must be false: otherwise {reason}")


def _layers(args: Arguments, pp: int, chunks: int) -> Iterator[Problem]:
    """Layers divide evenly over the stages whose share is not given."""
    layers, stages = args["num_layers"], pp
    layers += bool(args["account_for_embedding_in_pipeline_split"])
    layers += bool(args["account_for_loss_in_pipeline_split"])
    for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
        if args[name] is not None:
            layers, stages = layers - args[name], stages - 1
    if stages < 1 or layers < 0:
        yield args.problem("num_layers", "the first and last stage leave nothing to the others")
    elif layers % (stages * chunks):
        each = f"{stages} pipeline stages" + (f" x {chunks} virtual" if chunks > 1 else "")
        yield args.problem("num_layers", f"{layers} layers do not divide into {each}")


def _length(args: Arguments) -> Iterator[Problem]:
    iters, samples = args["train_iters"], args["train_samples"]
    if (iters is None) == (samples is None):
        found = "neither" if iters is None else "both"
        name = "train_iters" if iters is None else "train_samples"
        yield args.problem(name, f"give either train_iters or train_samples, found {found}")
    longest = args["max_position_embeddings"]
    if longest is not None and longest < args["seq_length"]:
        message = f"{longest} is less than seq_length {args['seq_length']}"
        yield args.problem("max_position_embeddings", message)


def _experts(args: Arguments) -> Iterator[Problem]:
    ep, experts = args["expert_model_parallel_size"], args["num_moe_experts"]
    if ep > 1 and not experts:
        yield args.problem("expert_model_parallel_size", f"{ep} needs num_moe_experts")
    elif experts and experts % ep:
        yield _indivisible(args, "num_moe_experts", "expert_model_parallel_size", ep)


def _data(args: Arguments) -> Iterator[Problem]:
    sets = ("data_path", "train_data_path")
    if not args["mock_data"] and all(args[name] is None for name in sets):
        yield args.problem("data_path", "is required (or `mock_data: true`)")


def _batches(args: Arguments, dp: int) -> Iterator[Problem]:
    micro, batch = args["micro_batch_size"], args["global_batch_size"]
    if batch is None:
        return
    if batch % (micro * dp):
        yield args.problem(
            "global_batch_size",
            f"{batch} is not divisible by micro_batch_size {micro} x data-parallel size {dp}",
        )
        return
    pp, count = args["pipeline_model_parallel_size"], batch // (micro * dp)
    if virtual_chunks(args) and pp > 1 and count % pp:
        yield args.problem(
            "global_batch_size",
            f"{batch} gives {count} micro-batches, which pipeline_model_parallel_size {pp} with "
            "virtual stages must divide",
        )


def _expert_ranks(args: Arguments, world_size: int) -> Iterator[Problem]:
    ep, pp = args["expert_model_parallel_size"], args["pipeline_model_parallel_size"]
    expert_tp = args["expert_tensor_parallel_size"] or args["tensor_model_parallel_size"]
    size = ep * expert_tp * pp
    if ep > 1 and world_size % size:
        message = f"{ep} x tensor {expert_tp} x pipeline {pp} does not divide {world_size} ranks"
        yield args.problem("expert_model_parallel_size", message)
