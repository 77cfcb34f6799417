"""Real datasets through megatron.core: the same global batches for every layout and resume."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
from argparse import Namespace
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.chat_files import write_conversations, write_tokenizer
from support.waiting import PATIENCE_SECONDS

from flagscale.errors import DataError
from flagscale.train.data.preprocess import PreprocessJob, preprocess
from flagscale.train.data.samplers import Shard
from flagscale.train.data.tokenizers import TokenizerSpec, open_tokenizer
from flagscale.train.state import Progress

pytestmark = [pytest.mark.integration, pytest.mark.torch]

BYTE_TOKENIZER = TokenizerSpec("ByteLevelTokenizer")
SEQ_LENGTH = 16
MASK_ID = 257  # BERT adds a mask token after the tokenizer's 257 tokens


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Write two datasets with different bytes: ``low`` has letters, ``high`` digits."""
    root = tmp_path_factory.mktemp("data sets")
    prefixes = {}
    for name, letters in (("low", "abcdefghij"), ("high", "0123456789")):
        source = root / f"{name}.jsonl"
        texts = [letters[i % 10] * (20 + i) for i in range(60)]
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        job = PreprocessJob((source,), str(root / name), BYTE_TOKENIZER, append_eod=True)
        prefixes[name] = preprocess(job).prefixes[0]
    return prefixes


def make_args(tmp_path: Path, **defaults: Any) -> Namespace:
    values: dict[str, Any] = {
        "family": "gpt",
        "data_path": None,
        "train_data_path": None,
        "valid_data_path": None,
        "test_data_path": None,
        "split": "8,1,1",
        "data_phases": None,
        "mock_data": False,
        "data_cache_path": str(tmp_path / "cache"),
        "save": None,
        "tensorboard_dir": None,
        "seq_length": SEQ_LENGTH,
        "seed": 5,
        "train_iters": 12,
        "train_samples": None,
        "skip_train": False,
        "eval_iters": 2,
        "eval_interval": 6,
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "num_workers": 0,
        "dataloader_type": "single",
        "external_data": None,
        "reset_position_ids": False,
        "mmap_bin_files": True,
        "num_dataset_builder_threads": 1,
        "mid_level_dataset_surplus": 0.005,
        "eod_mask_loss": False,
        "reset_attention_mask": False,
        "sft": False,
        "dpo": False,
        "multiple_validation_sets": None,
    }
    return Namespace(**{**values, **defaults})


def build_iterators(
    arguments: Namespace, progress: Progress | None = None, **iterator_options: Any
) -> Any:
    from flagscale.train.data.datasets import build_data_iterators

    spec = BYTE_TOKENIZER
    if arguments.sft:
        spec = TokenizerSpec("HuggingFaceTokenizer", arguments.tokenizer_path)
    tokenizer = open_tokenizer(spec)
    shard = Shard.for_equal_ranks(micro_batch_size=arguments.micro_batch_size)
    iterator_options.setdefault("shard", shard)
    return build_data_iterators(arguments, tokenizer, progress or Progress(), **iterator_options)


def read_global_batches(
    arguments: Namespace,
    layout: tuple[int, int],
    step_count: int,
    *,
    skipped_steps: int = 0,
    split: str = "train",
) -> list[list[list[int]]]:
    """Return the tokens of each step's global batch, assembled from all data-parallel ranks."""
    micro_batch_size, rank_count = layout
    arguments = Namespace(**{**vars(arguments), "micro_batch_size": micro_batch_size})
    consumed = skipped_steps * arguments.global_batch_size
    progress = Progress(skipped_steps, consumed, consumed)
    ranks = [
        getattr(
            build_iterators(
                arguments, progress, shard=Shard.for_equal_ranks(rank, rank_count, micro_batch_size)
            ),
            split,
        )
        for rank in range(rank_count)
    ]
    rounds_per_step = arguments.global_batch_size // (micro_batch_size * rank_count)
    return [
        [
            row
            for _ in range(rounds_per_step)
            for rank in ranks
            for row in next(rank)["tokens"].tolist()
        ]
        for _ in range(step_count)
    ]


def test_batch_has_shifted_labels_positions_and_loss_mask(
    data: dict[str, str], tmp_path: Path
) -> None:
    batch = next(build_iterators(make_args(tmp_path, data_path=[data["low"]])).train)
    assert {key: tuple(value.shape) for key, value in batch.items()} == dict.fromkeys(
        ("tokens", "labels", "loss_mask", "position_ids"), (2, SEQ_LENGTH)
    )
    assert batch["tokens"][:, 1:].tolist() == batch["labels"][:, :-1].tolist()
    assert batch["position_ids"].tolist() == [list(range(SEQ_LENGTH))] * 2
    assert batch["loss_mask"].tolist() == [[1.0] * SEQ_LENGTH] * 2


DATA_FUNCTION_SOURCE = """
import torch

def batches(args, tokenizer, split, samples):
    if split == "test":
        return None
    return made(args, 100 if split == "valid" else 0, samples)

def made(args, first, samples):
    for numbers in samples:
        column = torch.tensor(numbers)[:, None] % 100 + first
        tokens = column.expand(-1, args.seq_length + 1)
        yield {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
"""


def test_external_data_is_the_same_in_every_layout(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(DATA_FUNCTION_SOURCE)
    external = make_args(
        tmp_path, dataloader_type="external", external_data=f"{tmp_path}/own.py:batches"
    )
    expected_batches = read_global_batches(external, (2, 1), 4)
    assert [row[0] for step in expected_batches for row in step] == list(range(32))
    assert read_global_batches(external, (1, 4), 2, skipped_steps=2) == expected_batches[2:]
    assert read_global_batches(external, (2, 2), 1, split="valid", skipped_steps=1) == [
        [[108 + i] * SEQ_LENGTH for i in range(8)]
    ]
    assert build_iterators(external).test is None
    first_chunk, second = build_iterators(external, model_chunks=2).train
    assert next(first_chunk)["tokens"].tolist() == next(second)["tokens"].tolist()


@pytest.mark.parametrize("dataloader_type", ["single", "cyclic"])
def test_every_layout_sees_the_same_steps(
    data: dict[str, str], tmp_path: Path, dataloader_type: str
) -> None:
    arguments = make_args(tmp_path, data_path=[data["low"]], dataloader_type=dataloader_type)
    expected_batches = read_global_batches(arguments, (2, 1), 12)
    for layout in ((1, 1), (8, 1), (1, 2), (2, 4), (1, 8)):
        assert read_global_batches(arguments, layout, 12) == expected_batches
        assert read_global_batches(arguments, layout, 5, skipped_steps=7) == expected_batches[7:]


def test_every_layout_sees_the_same_conversations(tmp_path: Path) -> None:
    """The run reads several epochs, and has separate validation datasets."""
    valid = [
        str(write_conversations(tmp_path / f"{name}.jsonl", 9, seed=7)) for name in ("one", "two")
    ]
    arguments = make_args(
        tmp_path,
        split=None,
        train_data_path=[str(write_conversations(tmp_path / "talks.jsonl", 90))],
        valid_data_path=valid,
        multiple_validation_sets=True,
        tokenizer_path=str(write_tokenizer(tmp_path / "tokenizer")),
        seq_length=256,
        **{"sft": True, "sft_format": "auto", "sft_packing": True, "sft_too_long": "refuse"},
        chat_template=None,
    )
    expected_batches = read_global_batches(arguments, (2, 1), 12)
    assert len({str(row) for step in expected_batches for row in step}) < 12 * 8
    assert expected_batches[:6] != expected_batches[6:]
    for layout in ((1, 1), (8, 1), (2, 4)):
        assert read_global_batches(arguments, layout, 5, skipped_steps=7) == expected_batches[7:]
    documents = build_iterators(arguments)
    assert documents.valid is documents.test is None
    assert list(documents.validation_sets) == ["one", "two"]


def test_evaluation_resumes_in_another_layout(data: dict[str, str], tmp_path: Path) -> None:
    arguments = make_args(tmp_path, data_path=[data["low"]])
    expected_batches = read_global_batches(arguments, (2, 1), 6, split="valid")
    assert (
        read_global_batches(arguments, (1, 4), 3, skipped_steps=3, split="valid")
        == expected_batches[3:]
    )
    assert len(read_global_batches(arguments, (2, 1), 2, split="test")) == 2


def test_validation_sets_are_evaluated_separately(data: dict[str, str], tmp_path: Path) -> None:
    separate = {"train_data_path": [data["high"]], "valid_data_path": [data["low"], data["high"]]}
    arguments = make_args(tmp_path, **separate, split=None, multiple_validation_sets=True)
    batches = build_iterators(arguments, Progress(3, 24, 24))
    assert batches.valid is None
    names = [Path(prefix).name for prefix in separate["valid_data_path"]]
    assert list(batches.validation_sets) == names
    reference_args = make_args(
        tmp_path, **{**separate, "valid_data_path": [data["low"]]}, split=None
    )
    expected = build_iterators(reference_args, Progress(3, 24, 24)).valid
    for _ in range(4):
        digits = next(batches.validation_sets[names[1]])["tokens"]
        assert not any(ord("a") <= token <= ord("z") for token in digits.flatten().tolist())
        letters = next(batches.validation_sets[names[0]])["tokens"]
        assert letters.tolist() == next(expected)["tokens"].tolist()
    training_batches = [next(batches.train)["tokens"].tolist() for _ in range(4)]
    batches_without_separation = build_iterators(
        make_args(tmp_path, **separate, split=None), Progress(3, 24, 24)
    ).train
    assert training_batches == [
        next(batches_without_separation)["tokens"].tolist() for _ in range(4)
    ]


def test_blends_keep_their_weights(data: dict[str, str], tmp_path: Path) -> None:
    values = [str(part) for part in ("0.25", data["low"], "0.75", data["high"])]
    rows = [
        row
        for step in read_global_batches(make_args(tmp_path, data_path=values), (2, 1), 12)
        for row in step
    ]
    letters = sum(np.median(row) >= ord("a") for row in rows)
    assert letters == pytest.approx(len(rows) / 4, abs=3)


def test_blends_change_at_the_start_of_a_phase(data: dict[str, str], tmp_path: Path) -> None:
    """A phase may begin within a step; every layout and resumed run sees the same batches."""
    low, high = data["low"], data["high"]
    phases = [f"samples=36 0.25 '{low}' 0.75 '{high}'", f"tokens={72 * SEQ_LENGTH} '{low}'"]
    arguments = make_args(tmp_path, data_path=["0.75", low, "0.25", high], data_phases=phases)
    expected_batches = read_global_batches(arguments, (2, 1), 12)
    rows = [row for step in expected_batches for row in step]
    letters = [bool(np.median(row) >= ord("a")) for row in rows]
    counts = [sum(letters[a:b]) for a, b in ((0, 36), (36, 72), (72, 96))]
    assert counts == [27, 9, 24]
    for layout, tokens in (((1, 1), 2), ((2, 4), 5), ((8, 1), 9)):
        assert (
            read_global_batches(arguments, layout, 12 - tokens, skipped_steps=tokens)
            == expected_batches[tokens:]
        )
    assert len(read_global_batches(arguments, (2, 1), 2, split="valid")) == 2
    assert len(list((tmp_path / "cache").rglob("*-phases-*.npy"))) == 2


def test_a_blend_without_weights_is_passed_through_once(
    data: dict[str, str], tmp_path: Path
) -> None:
    paths = [data["low"], data["high"]]
    with pytest.raises(DataError, match="are read once"):
        build_iterators(make_args(tmp_path, data_path=paths, train_iters=1000))
    cyclic = make_args(tmp_path, data_path=paths, train_iters=1000, dataloader_type="cyclic")
    assert len(read_global_batches(cyclic, (2, 1), 100)) == 100


def test_separate_data_for_each_split(data: dict[str, str], tmp_path: Path) -> None:
    arguments = make_args(
        tmp_path, split=None, train_data_path=[data["low"]], valid_data_path=[data["high"]]
    )
    batches = build_iterators(arguments)
    assert int(next(batches.train)["tokens"].median()) >= ord("a")
    assert int(next(batches.valid)["tokens"].median()) < ord("a")
    assert batches.test is None


def test_chunks_get_the_same_batches(data: dict[str, str], tmp_path: Path) -> None:
    arguments = make_args(tmp_path, data_path=[data["low"]])
    reference_batches = [
        batch["tokens"].tolist() for batch in islice(build_iterators(arguments).train, 6)
    ]
    first_chunk, second_chunk = build_iterators(arguments, model_chunks=2).train
    ahead = [next(first_chunk)["tokens"].tolist() for _ in range(4)]  # one chunk runs ahead
    second = [next(second_chunk)["tokens"].tolist() for _ in range(6)]
    assert (
        ahead + [next(first_chunk)["tokens"].tolist() for _ in range(2)]
        == second
        == reference_batches
    )
    assert next(first_chunk) is not next(second_chunk)


def test_worker_processes_yield_the_same_batches(data: dict[str, str], tmp_path: Path) -> None:
    arguments = make_args(tmp_path, data_path=[data["low"]])
    expected_batches = read_global_batches(arguments, (2, 1), 4)
    arguments.num_workers = 2
    assert read_global_batches(arguments, (2, 1), 4) == expected_batches


def test_loader_processes_outlive_a_stop_request_but_not_their_rank(
    data: dict[str, str], tmp_path: Path
) -> None:
    arguments = make_args(tmp_path, data_path=[data["low"]])
    reference_batches = [batch["tokens"].tolist() for batch in build_iterators(arguments).train]
    arguments.num_workers = 1
    before = set(multiprocessing.active_children())
    train = build_iterators(arguments).train
    batches = [next(train)["tokens"].tolist()]
    workers = set(multiprocessing.active_children()) - before
    assert workers
    for worker in workers:
        os.kill(worker.pid or 0, signal.SIGTERM)
    batches += [batch["tokens"].tolist() for batch in train]
    assert batches == reference_batches
    del train
    gc.collect()
    for worker in workers:
        worker.join(PATIENCE_SECONDS)
        assert not worker.is_alive()


def test_mock_data_has_the_requested_shape(tmp_path: Path) -> None:
    batch = build_iterators(make_args(tmp_path, mock_data=True, split=None))
    assert next(batch.train)["tokens"].shape == (2, SEQ_LENGTH)
    assert next(batch.valid)["tokens"].shape == (2, SEQ_LENGTH)


def test_a_masked_model_sees_the_same_steps_in_every_layout(
    data: dict[str, str], tmp_path: Path
) -> None:
    arguments = make_args(tmp_path, data_path=[data["low"]], family="bert", mask_prob=0.25)
    expected_batches = read_global_batches(arguments, (2, 1), 12)
    assert any(MASK_ID in row for step in expected_batches for row in step)
    for layout in ((8, 1), (1, 4)):
        assert read_global_batches(arguments, layout, 5, skipped_steps=7) == expected_batches[7:]


def test_masked_batch_predicts_a_fixed_number_of_ordinary_tokens(
    data: dict[str, str], tmp_path: Path
) -> None:
    arguments = make_args(tmp_path, data_path=[data["low"]], family="bert", mask_prob=0.25)
    batch = next(build_iterators(arguments).train)
    assert {key: tuple(value.shape) for key, value in batch.items()} == dict.fromkeys(
        ("tokens", "labels", "loss_mask", "position_ids"), (2, SEQ_LENGTH)
    )
    assert batch["loss_mask"].sum(1).tolist() == [SEQ_LENGTH / 4] * 2
    predicted = batch["loss_mask"] > 0
    assert batch["tokens"][~predicted].eq(batch["labels"][~predicted]).all()
    assert batch["labels"][predicted].ne(256).all()  # the end of a document


def test_each_epoch_masks_other_tokens(data: dict[str, str], tmp_path: Path) -> None:
    """The data is one sequence, read repeatedly."""
    arguments = make_args(
        tmp_path, data_path=[data["low"]], family="bert", mask_prob=0.25, split="1,0,0",
        seq_length=2900, train_iters=3, global_batch_size=1, micro_batch_size=1, eval_iters=0,
    )  # fmt: skip
    batches_of_epochs = list(islice(build_iterators(arguments).train, 3))
    predicted_positions = {
        tuple(batch["loss_mask"][0].nonzero().squeeze(1).tolist()) for batch in batches_of_epochs
    }
    assert len(predicted_positions) == 3


def test_document_options_reset_positions_and_mask_the_loss(
    data: dict[str, str], tmp_path: Path
) -> None:
    arguments = make_args(
        tmp_path,
        data_path=[data["low"]],
        seq_length=64,
        reset_position_ids=True,
        eod_mask_loss=True,
        mmap_bin_files=False,
    )
    batch = next(build_iterators(arguments).train)
    ends = batch["tokens"] == 256
    assert bool(ends.any())
    assert batch["loss_mask"][ends].eq(0).all()
    assert int(batch["position_ids"].max()) < 63


def test_rewritten_data_is_not_read_through_an_old_cache(tmp_path: Path) -> None:
    source = tmp_path / "text.txt"
    batches = []
    for letter in "ab":
        source.write_text(f"{letter * 30}\n" * (40 if letter == "a" else 20))
        job = PreprocessJob(
            (source,), str(tmp_path / "set"), BYTE_TOKENIZER, file_format="lines", overwrite=True
        )
        prefix = preprocess(job).prefixes[0]
        batches.append(
            read_global_batches(make_args(tmp_path, data_path=[prefix], eval_iters=0), (2, 1), 12)
        )
    assert {token for step in batches[1] for row in step for token in row} == {ord("b")}


def test_a_truncated_cache_is_reported(data: dict[str, str], tmp_path: Path) -> None:
    arguments = make_args(tmp_path, data_path=[data["low"]])
    build_iterators(arguments)
    for path in (tmp_path / "cache").rglob("*shuffle_index.npy"):
        path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DataError, match="index cache cannot be read"):
        build_iterators(arguments)


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        pytest.param({"data_cache_path": "file/x"}, "set data_cache_path to a", id="given"),
        pytest.param(
            {"data_cache_path": None, "save": "file/checkpoints"},
            "without data_cache_path the cache is next to save; set data_cache_path to a",
            id="beside-save",
        ),
    ],
)
def test_an_unwritable_cache_is_reported(
    data: dict[str, str], tmp_path: Path, settings: dict[str, str | None], hint: str
) -> None:
    (tmp_path / "file").touch()
    settings_with_paths = {
        name: value and str(tmp_path / value) for name, value in settings.items()
    }
    with pytest.raises(DataError, match="index cache cannot be written") as error:
        build_iterators(make_args(tmp_path, data_path=[data["low"]], **settings_with_paths))
    assert (error.value.hint or "").startswith(hint)


def test_a_token_outside_the_vocabulary_is_refused_when_it_is_read(
    data: dict[str, str], tmp_path: Path
) -> None:
    """Start-up checks samples of a file; what they miss is noticed in the step that reads it."""
    prefix = tmp_path / "copy"
    for suffix in (".bin", ".idx"):
        prefix.with_suffix(suffix).write_bytes(Path(data["low"] + suffix).read_bytes())
    iterators = build_iterators(make_args(tmp_path, data_path=[str(prefix)], split="1,0,0"))
    tokens = np.memmap(prefix.with_suffix(".bin"), dtype=np.uint16, mode="r+")
    tokens[:] = 60_000
    tokens.flush()
    with pytest.raises(DataError, match=r"copy: sample \d+ has the token id 60000, but ids are 0"):
        next(iterators.train)
