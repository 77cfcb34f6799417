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

from flagscale.errors import DataError
from flagscale.train.data.preprocess import PreprocessJob, preprocess
from flagscale.train.data.samplers import Shard
from flagscale.train.data.tokenizers import TokenizerSpec, open_tokenizer
from flagscale.train.state import Progress

pytestmark = [pytest.mark.integration, pytest.mark.torch]

SPEC = TokenizerSpec("ByteLevelTokenizer")
SEQ = 16
SPEC_MASK = 257  # one more than the tokenizer has


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
        job = PreprocessJob((source,), str(root / name), SPEC, append_eod=True)
        prefixes[name] = preprocess(job).prefixes[0]
    return prefixes


def args(tmp_path: Path, **defaults: Any) -> Namespace:
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
        "seq_length": SEQ,
        "seed": 5,
        "train_iters": 12,
        "train_samples": None,
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
        "multiple_validation_sets": None,
    }
    return Namespace(**{**values, **defaults})


def iterators(arguments: Namespace, progress: Progress | None = None, **tokenizer_args: Any) -> Any:
    from flagscale.train.data.datasets import build_data_iterators

    spec = SPEC
    if arguments.sft:
        spec = TokenizerSpec("HuggingFaceTokenizer", arguments.tokenizer_path)
    tokenizer = open_tokenizer(spec)
    tokenizer_args.setdefault("shard", Shard.even(micro_batch_size=arguments.micro_batch_size))
    return build_data_iterators(arguments, tokenizer, progress or Progress(), **tokenizer_args)


def steps(
    arguments: Namespace, layout: tuple[int, int], count: int, *, skip: int = 0, kind: str = "train"
) -> list[list[list[int]]]:
    """Return the tokens of each step's global batch, assembled from all data-parallel ranks."""
    micro, size = layout
    arguments = Namespace(**{**vars(arguments), "micro_batch_size": micro})
    consumed = skip * arguments.global_batch_size
    progress = Progress(skip, consumed, consumed)
    ranks = [
        getattr(iterators(arguments, progress, shard=Shard.even(rank, size, micro)), kind)
        for rank in range(size)
    ]
    per_step = arguments.global_batch_size // (micro * size)
    return [
        [row for _ in range(per_step) for rank in ranks for row in next(rank)["tokens"].tolist()]
        for _ in range(count)
    ]


def test_a_batch_is_what_training_takes(data: dict[str, str], tmp_path: Path) -> None:
    batch = next(iterators(args(tmp_path, data_path=[data["low"]])).train)
    assert {key: tuple(value.shape) for key, value in batch.items()} == dict.fromkeys(
        ("tokens", "labels", "loss_mask", "position_ids"), (2, SEQ)
    )
    assert batch["tokens"][:, 1:].tolist() == batch["labels"][:, :-1].tolist()
    assert batch["position_ids"].tolist() == [list(range(SEQ))] * 2
    assert batch["loss_mask"].tolist() == [[1.0] * SEQ] * 2


OWN = """
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
    (tmp_path / "own.py").write_text(OWN)
    external = args(
        tmp_path, dataloader_type="external", external_data=f"{tmp_path}/own.py:batches"
    )
    whole = steps(external, (2, 1), 4)
    assert [row[0] for step in whole for row in step] == list(range(32))
    assert steps(external, (1, 4), 2, skip=2) == whole[2:]
    assert steps(external, (2, 2), 1, kind="valid", skip=1) == [[[108 + i] * SEQ for i in range(8)]]
    assert iterators(external).test is None
    first, second = iterators(external, chunks=2).train  # of two model chunks
    assert next(first)["tokens"].tolist() == next(second)["tokens"].tolist()


@pytest.mark.parametrize("kind", ["single", "cyclic"])
def test_every_layout_sees_the_same_steps(data: dict[str, str], tmp_path: Path, kind: str) -> None:
    arguments = args(tmp_path, data_path=[data["low"]], dataloader_type=kind)
    whole = steps(arguments, (2, 1), 12)
    for layout in ((1, 1), (8, 1), (1, 2), (2, 4), (1, 8)):
        assert steps(arguments, layout, 12) == whole
        assert steps(arguments, layout, 5, skip=7) == whole[7:]


def test_every_layout_sees_the_same_conversations(tmp_path: Path) -> None:
    """Several epochs in different order, and separate validation datasets."""
    valid = [
        str(write_conversations(tmp_path / f"{name}.jsonl", 9, seed=7)) for name in ("one", "two")
    ]
    arguments = args(
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
    whole = steps(arguments, (2, 1), 12)
    assert len({str(row) for step in whole for row in step}) < 12 * 8
    assert whole[:6] != whole[6:]
    for layout in ((1, 1), (8, 1), (2, 4)):
        assert steps(arguments, layout, 5, skip=7) == whole[7:]
    documents = iterators(arguments)
    assert (documents.valid, documents.test, list(documents.validations)) == (
        None,
        None,
        ["one", "two"],
    )


def test_evaluation_resumes_too(data: dict[str, str], tmp_path: Path) -> None:
    arguments = args(tmp_path, data_path=[data["low"]])
    whole = steps(arguments, (2, 1), 6, kind="valid")
    assert steps(arguments, (1, 4), 3, skip=3, kind="valid") == whole[3:]
    assert len(steps(arguments, (2, 1), 2, kind="test")) == 2


def test_validation_sets_are_evaluated_separately(data: dict[str, str], tmp_path: Path) -> None:
    separate = {"train_data_path": [data["high"]], "valid_data_path": [data["low"], data["high"]]}
    arguments = args(tmp_path, **separate, split=None, multiple_validation_sets=True)
    batches = iterators(arguments, Progress(3, 24, 24))
    assert batches.valid is None
    names = [Path(prefix).name for prefix in separate["valid_data_path"]]
    assert list(batches.validations) == names
    alone = args(tmp_path, **{**separate, "valid_data_path": [data["low"]]}, split=None)
    expected = iterators(alone, Progress(3, 24, 24)).valid
    for _ in range(4):
        digits = next(batches.validations[names[1]])["tokens"]
        assert not any(ord("a") <= token <= ord("z") for token in digits.flatten().tolist())
        letters = next(batches.validations[names[0]])["tokens"]
        assert letters.tolist() == next(expected)["tokens"].tolist()
    trained = [next(batches.train)["tokens"].tolist() for _ in range(4)]
    without = iterators(args(tmp_path, **separate, split=None), Progress(3, 24, 24)).train
    assert trained == [next(without)["tokens"].tolist() for _ in range(4)]


def test_blends_keep_their_weights(data: dict[str, str], tmp_path: Path) -> None:
    values = [str(part) for part in ("0.25", data["low"], "0.75", data["high"])]
    rows = [row for step in steps(args(tmp_path, data_path=values), (2, 1), 12) for row in step]
    letters = sum(np.median(row) >= ord("a") for row in rows)
    assert letters == pytest.approx(len(rows) / 4, abs=3)


def test_blends_change_at_the_start_of_a_phase(data: dict[str, str], tmp_path: Path) -> None:
    """In the middle of a step, equally in every layout, before and after a restart in either
    phase.
    """
    low, high = data["low"], data["high"]
    phases = [f"samples=36 0.25 '{low}' 0.75 '{high}'", f"tokens={72 * SEQ} '{low}'"]
    arguments = args(tmp_path, data_path=["0.75", low, "0.25", high], data_phases=phases)
    whole = steps(arguments, (2, 1), 12)
    rows = [row for step in whole for row in step]
    letters = [bool(np.median(row) >= ord("a")) for row in rows]
    counts = [sum(letters[a:b]) for a, b in ((0, 36), (36, 72), (72, 96))]
    assert counts == [27, 9, 24]
    for layout, tokens in (((1, 1), 2), ((2, 4), 5), ((8, 1), 9)):
        assert steps(arguments, layout, 12 - tokens, skip=tokens) == whole[tokens:]
    assert len(steps(arguments, (2, 1), 2, kind="valid")) == 2
    assert len(list((tmp_path / "cache").rglob("*-phases-*.npy"))) == 2


def test_a_blend_without_weights_is_passed_through_once(
    data: dict[str, str], tmp_path: Path
) -> None:
    paths = [data["low"], data["high"]]
    with pytest.raises(DataError, match="passed through once"):
        iterators(args(tmp_path, data_path=paths, train_iters=1000))
    cyclic = args(tmp_path, data_path=paths, train_iters=1000, dataloader_type="cyclic")
    assert len(steps(cyclic, (2, 1), 100)) == 100


def test_separate_data_for_each_split(data: dict[str, str], tmp_path: Path) -> None:
    arguments = args(
        tmp_path, split=None, train_data_path=[data["low"]], valid_data_path=[data["high"]]
    )
    batches = iterators(arguments)
    assert int(next(batches.train)["tokens"].median()) >= ord("a")
    assert int(next(batches.valid)["tokens"].median()) < ord("a")
    assert batches.test is None


def test_chunks_get_the_same_batches(data: dict[str, str], tmp_path: Path) -> None:
    arguments = args(tmp_path, data_path=[data["low"]])
    alone = [batch["tokens"].tolist() for batch in islice(iterators(arguments).train, 6)]
    first, two = iterators(arguments, chunks=2).train
    ahead = [next(first)["tokens"].tolist() for _ in range(4)]  # one chunk runs ahead
    second = [next(two)["tokens"].tolist() for _ in range(6)]
    assert ahead + [next(first)["tokens"].tolist() for _ in range(2)] == second == alone
    assert next(first) is not next(two)


def test_loader_processes_give_the_same(data: dict[str, str], tmp_path: Path) -> None:
    arguments = args(tmp_path, data_path=[data["low"]])
    whole = steps(arguments, (2, 1), 4)
    arguments.num_workers = 2
    assert steps(arguments, (2, 1), 4) == whole


def test_loader_processes_outlive_a_stop_request_but_not_their_rank(
    data: dict[str, str], tmp_path: Path
) -> None:
    arguments = args(tmp_path, data_path=[data["low"]])
    alone = [batch["tokens"].tolist() for batch in iterators(arguments).train]
    arguments.num_workers = 1
    before = set(multiprocessing.active_children())
    train = iterators(arguments).train
    batches = [next(train)["tokens"].tolist()]
    workers = set(multiprocessing.active_children()) - before
    assert workers
    for worker in workers:
        os.kill(worker.pid or 0, signal.SIGTERM)
    batches += [batch["tokens"].tolist() for batch in train]
    assert batches == alone
    del train
    gc.collect()
    for worker in workers:
        worker.join(20)
        assert not worker.is_alive()


def test_mock_data(tmp_path: Path) -> None:
    batch = iterators(args(tmp_path, mock_data=True, split=None))
    assert next(batch.train)["tokens"].shape == (2, SEQ)
    assert next(batch.valid)["tokens"].shape == (2, SEQ)


def test_a_masked_model_sees_the_same_steps_in_every_layout(
    data: dict[str, str], tmp_path: Path
) -> None:
    arguments = args(tmp_path, data_path=[data["low"]], family="bert", mask_prob=0.25)
    whole = steps(arguments, (2, 1), 12)
    assert any(SPEC_MASK in row for step in whole for row in step)
    for layout in ((8, 1), (1, 4)):
        assert steps(arguments, layout, 5, skip=7) == whole[7:]


def test_a_masked_batch(data: dict[str, str], tmp_path: Path) -> None:
    arguments = args(tmp_path, data_path=[data["low"]], family="bert", mask_prob=0.25)
    batch = next(iterators(arguments).train)
    assert {key: tuple(value.shape) for key, value in batch.items()} == dict.fromkeys(
        ("tokens", "labels", "loss_mask", "position_ids"), (2, SEQ)
    )
    assert batch["loss_mask"].sum(1).tolist() == [SEQ / 4] * 2
    predicted = batch["loss_mask"] > 0
    assert batch["tokens"][~predicted].eq(batch["labels"][~predicted]).all()
    assert batch["labels"][predicted].ne(256).all()  # the end of a document


def test_an_epoch_later_other_tokens_are_masked(data: dict[str, str], tmp_path: Path) -> None:
    """The data is one sequence, read repeatedly."""
    arguments = args(
        tmp_path, data_path=[data["low"]], family="bert", mask_prob=0.25, split="1,0,0",
        seq_length=2900, train_iters=3, global_batch_size=1, micro_batch_size=1, eval_iters=0,
    )  # fmt: skip
    every = list(islice(iterators(arguments).train, 3))
    chosen = {tuple(batch["loss_mask"][0].nonzero().squeeze(1).tolist()) for batch in every}
    assert len(chosen) == 3


def test_options_of_documents(data: dict[str, str], tmp_path: Path) -> None:
    arguments = args(
        tmp_path,
        data_path=[data["low"]],
        seq_length=64,
        reset_position_ids=True,
        eod_mask_loss=True,
        mmap_bin_files=False,
    )
    batch = next(iterators(arguments).train)
    ends = batch["tokens"] == 256
    assert bool(ends.any())
    assert batch["loss_mask"][ends].eq(0).all()
    assert int(batch["position_ids"].max()) < 63


def test_rewritten_data_is_not_read_through_an_old_cache(tmp_path: Path) -> None:
    source = tmp_path / "text.txt"
    batches = []
    for letter in "ab":
        source.write_text(f"{letter * 30}\n" * (40 if letter == "a" else 20))
        job = PreprocessJob((source,), str(tmp_path / "set"), SPEC, format="lines", overwrite=True)
        prefix = preprocess(job).prefixes[0]
        batches.append(steps(args(tmp_path, data_path=[prefix], eval_iters=0), (2, 1), 12))
    assert {token for step in batches[1] for row in step for token in row} == {ord("b")}


def test_a_truncated_cache_is_reported(data: dict[str, str], tmp_path: Path) -> None:
    arguments = args(tmp_path, data_path=[data["low"]])
    iterators(arguments)
    for path in (tmp_path / "cache").rglob("*shuffle_index.npy"):
        path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DataError, match="index cache cannot be read"):
        iterators(arguments)


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        pytest.param({"data_cache_path": "file/x"}, "set data_cache_path to a", id="given"),
        pytest.param(
            {"data_cache_path": None, "save": "file/checkpoints"},
            "without data_cache_path the cache lies beside save; set data_cache_path to a",
            id="beside-save",
        ),
    ],
)
def test_a_cache_that_cannot_be_written(
    data: dict[str, str], tmp_path: Path, settings: dict[str, str | None], hint: str
) -> None:
    (tmp_path / "file").touch()
    places = {name: value and str(tmp_path / value) for name, value in settings.items()}
    with pytest.raises(DataError, match="index cache cannot be written") as error:
        iterators(args(tmp_path, data_path=[data["low"]], **places))
    assert (error.value.hint or "").startswith(hint)
