"""Arguments that may differ between the hosts of a job, each with the reason why that is harmless.

Every other argument has one value for the job: with two, ranks may wait for each other forever or
train different weights without an error. tests/integration/train/test_heterogeneous_hosts.py trains
with different values of all arguments of this list. Its ranks end with equal weights, which are
those of a run with one value, and stop together with a checkpoint.

These look harmless and are left out on purpose:

- Paths of data: only rank 0 builds the index cache, whose name depends on the path of the data.
- ``save`` and ``load``: the value of rank 0 is used by all ranks.
- ``tensorboard_dir``: the cache may be next to it.
- Arguments of metrics sinks: only the rank that reports reads them.
- Recomputation and the fused loss: they call tensor- and expert-parallel collectives.
- Fused dropout: its random numbers differ from those of tensor-parallel peers without it.
- Fused GELU: it is another function.
- ``transformer_impl``: it orders parameters differently.
- Megatron-LM's timers: they gather values across ranks.
- ``log_interval``, ``log_params_norm``, ``log_num_zeros_in_grad``, ``log_straggler``: all ranks
  take part in them.
"""

from __future__ import annotations

from collections.abc import Mapping

_REPORTING_RANK_ONLY = "only the rank that reports uses it; no other rank waits for it"
_PROCESS_MEMORY = "affects only the memory of this process"

GROUPS: Mapping[str, Mapping[str, str]] = {
    "Implementation of kernels": {
        "attention_backend": "another kernel for the same function, equal up to rounding; "
        "parameters, collectives and random numbers are the same",
    },
    "Paths that differ between hosts": {
        "tokenizer_path": "its content must be the same: it is part of the name of the index "
        "cache, so another tokenizer has no cache, and the run fails",
        "data_cache_path": "another path of the same directory; if the index cache of rank 0 is "
        "not there, the run fails",
    },
    "Process of a rank": {
        "num_workers": "the batches do not depend on the processes that load them",
        "manual_gc": _PROCESS_MEMORY,
        "manual_gc_interval": _PROCESS_MEMORY,
        "peak_tflops": "affects only reported metrics: MFU, and the step time in a plan",
    },
    "Logging that no other rank waits for": {
        "loss_spike_factor": "threshold of a warning of the rank that reports",
        "straggler_threshold": "threshold of a warning of the rank that reports",
        "log_throughput": _REPORTING_RANK_ONLY,
        "log_memory_to_tensorboard": _REPORTING_RANK_ONLY,
        "log_learning_rate_to_tensorboard": _REPORTING_RANK_ONLY,
        "log_validation_ppl_to_tensorboard": _REPORTING_RANK_ONLY,
        "tensorboard_queue_size": _REPORTING_RANK_ONLY,
    },
    "Tuning of communication": {
        "comm": "only the options `socket_ifname`, `ib_hca` and `debug`: names of the host's "
        "network adapters, and log output",
        "distributed_timeout_minutes": "time that a rank waits before it fails; the shortest one "
        "applies to the job",
    },
}
"""Arguments that may differ, by group, each with the reason why that is harmless."""

ARGUMENTS: Mapping[str, str] = {
    name: why for group in GROUPS.values() for name, why in group.items()
}

PER_HOST_COMM_OPTIONS = frozenset({"socket_ifname", "ib_hca", "debug"})
"""Options of communication backends (``system.comm``) that may differ. The others choose an
algorithm, on which ranks have to agree.
"""

CONSEQUENCES: Mapping[str, str] = {
    "micro_batch_size": "ranks would train some samples twice and others never (hetero_mode: dp "
    "supports different micro-batch sizes)",
}
"""Consequence of different values, for arguments that users often try to override."""
