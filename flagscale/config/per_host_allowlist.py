"""Arguments that may differ between the hosts of a job, each with what makes it harmless.

Every other argument is one value for the job: with two, ranks wait for each other for ever or train
unlike weights without a word. What stands here is trained with unlike values in
tests/integration/train/test_heterogeneous_hosts.py: its ranks end with equal weights, those of a
run with like values, and stop together with a checkpoint.

Left out, though they look harmless: paths of data, since rank 0 alone builds the index cache,
which is found by the data's path; ``save`` and ``load``, whose value on rank 0 counts for all;
``tensorboard_dir``, beside which the cache may lie; W&B's, which only the rank that reports reads;
recomputation and the fused loss, which call tensor- and expert-parallel collectives of their own;
fused dropout, which draws other numbers than its tensor-parallel partners; fused GELU, which is
another function; ``transformer_impl``, which orders parameters in another way; what Megatron-LM's
timers gather across ranks; and of logging what a rank has to take part in: ``log_interval``,
``log_params_norm``, ``log_num_zeros_in_grad``.
"""

from __future__ import annotations

from collections.abc import Mapping

_RANK_0 = "the rank that reports writes it; the others wait for nothing"

GROUPS: Mapping[str, Mapping[str, str]] = {
    "Implementation of kernels": {
        "attention_backend": "the same function by another kernel, up to rounding; parameters, "
        "collectives and random numbers are alike",
    },
    "Files that a host has elsewhere": {
        "tokenizer_path": "of the same content: it is part of the name of the index cache, so "
        "another tokenizer finds none and ends the run",
        "data_cache_path": "the same directory by another name; without what rank 0 has built "
        "there, the run ends",
    },
    "A rank's own process": {
        "num_workers": "who loads a batch does not change it",
        "manual_gc": "of this process's memory alone",
        "manual_gc_interval": "of this process's memory alone",
        "peak_tflops": "of figures alone: MFU, and what a plan expects",
    },
    "Logging that no other rank waits for": {
        "loss_spike_factor": "a warning of the rank that reports",
        "log_throughput": _RANK_0,
        "log_memory_to_tensorboard": _RANK_0,
        "log_learning_rate_to_tensorboard": _RANK_0,
        "log_validation_ppl_to_tensorboard": _RANK_0,
        "tensorboard_queue_size": _RANK_0,
    },
    "Tuning of communication": {
        "comm": "of its options `socket_ifname`, `ib_hca` and `debug`: names of a host's own "
        "adapters, and what is said of them",
        "distributed_timeout_minutes": "how long a rank waits before it fails; the shortest ends "
        "the job",
    },
}
"""What may differ, by kind."""

ARGUMENTS: Mapping[str, str] = {
    name: why for group in GROUPS.values() for name, why in group.items()
}

COMM_OPTIONS = frozenset({"socket_ifname", "ib_hca", "debug"})
"""Options of communication backends that may differ. The others choose an algorithm, on which
ranks have to agree."""

INSTEAD: Mapping[str, str] = {
    "micro_batch_size": "ranks would train samples twice or never; hetero_mode: dp weighs unlike "
    "micro-batches",
}
"""For arguments that people want to differ, what would happen."""
