"""The training program's arguments about checkpoints. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from flagscale.config.arguments.spec import arg


@dataclass(frozen=True)
class Checkpointing:
    """What is saved where and when, and where training starts from."""

    save: str | None = arg(None, "Directory to save checkpoints in")
    load: str | None = arg(
        None, "Directory to start from: its latest whole checkpoint, if it has one"
    )
    pretrained_checkpoint: str | None = arg(
        None,
        "Where load holds no checkpoint, start from these weights, at step 0: a directory of "
        "Hugging Face (config.json, *.safetensors), whose config.json also gives the arguments of "
        "the model that the YAML leaves out, or one of checkpoints (docs/checkpoints.md)",
    )
    export_huggingface: str | None = arg(
        None,
        "Directory below which a run that has come to its end writes its last checkpoint for "
        "transformers, in iter_<steps>: safetensors, config.json and the tokenizer (needs save)",
    )
    save_interval: int | None = arg(
        None, "Steps between checkpoints; without it only the end is saved", minimum=1
    )
    rampup_save_interval: int | None = arg(
        None, "Steps between checkpoints while the batch grows; save_interval without it", minimum=1
    )
    keep_last: int | None = arg(
        None, "Keep this many newest checkpoints in --save; without it all", minimum=1
    )
    save_retain_interval: int | None = arg(
        None,
        "Keep checkpoints of steps that are multiples of this for ever; of the others keep_last, "
        "without it the newest",
        minimum=1,
    )
    async_save: bool = arg(False, "Write checkpoints from a forked process while training goes on")
    ckpt_format: str = arg(
        "torch_dist",
        "Format of the checkpoints that are saved: torch_dist; it is taken, with a note, for "
        "Megatron-LM's others too",
        choices=("torch_dist", "torch", "torch_dcp", "zarr", "fsdp_dtensor"),
    )
    ckpt_fully_parallel_save: bool = arg(
        True, "Spread the writing of a checkpoint over all data-parallel ranks"
    )
    ckpt_fully_parallel_load: bool = arg(
        False, "Spread the reading of a checkpoint over all data-parallel ranks"
    )
    verify_checkpoint: bool = arg(
        True,
        "Compare the checksums of everything in a checkpoint before it is loaded: every rank reads "
        "a part",
    )
    finetune: bool = arg(
        False, "Load the weights only and start from step 0 without optimizer, RNG and data state"
    )
    no_load_optim: bool = arg(False, "Do not load the optimizer's and the scheduler's state")
    no_load_rng: bool = arg(False, "Do not load the state of the random number generators")
    no_save_optim: bool = arg(False, "Do not save the optimizer's and the scheduler's state")
    no_save_rng: bool = arg(False, "Do not save the state of the random number generators")
    exit_on_missing_checkpoint: bool = arg(
        False, "Fail when --load has no checkpoint, instead of starting from step 0"
    )
