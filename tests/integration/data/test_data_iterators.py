"""Real data sets through megatron.core: the same global batches for every layout and resume."""

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
from support.chat_files import write_talks, write_tokenizer

from flagscale.errors import DataError
from flagscale.train.data.preprocess import Job, run
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
    """Two data sets whose bytes tell them apart: ``low`` is letters, ``high`` digits."""
    root = tmp_path_factory.mktemp("data sets")
    prefixes = {}
    for name, letters in (("low", "abcdefghij"), ("high", "0123456789")):
        source = root / f"{name}.jsonl"
        texts = [letters[i % 10] * (20 + i) for i in range(60)]
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        job = Job((source,), str(root / name), SPEC, append_eod=True)
        prefixes[name] = run(job).prefixes[0]
    return prefixes


def args(tmp_path: Path, **given: Any) -> Namespace:
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
    return Namespace(**{**values, **given})


def iterators(arguments: Namespace, progress: Progress | None = None, **given: Any) -> Any:
    from flagscale.train.data.datasets import build_data_iterators

    spec = SPEC
    if arguments.sft:
        spec = TokenizerSpec("HuggingFaceTokenizer", arguments.tokenizer_path)
    tokenizer = open_tokenizer(spec)
    given.setdefault("shard", Shard.even(micro_batch_size=arguments.micro_batch_size))
    return build_data_iterators(arguments, tokenizer, progress or Progress(), **given)


def steps(
    arguments: Namespace, layout: tuple[int, int], count: int, *, skip: int = 0, kind: str = "train"
) -> list[list[list[int]]]:
    """Tokens of each step's global batch, put together from all data-parallel ranks."""
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


def test_data_of_ones_own_is_the_same_in_every_layout(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    own = args(tmp_path, dataloader_type="external", external_data=f"{tmp_path}/own.py:batches")
    whole = steps(own, (2, 1), 4)
    assert [row[0] for step in whole for row in step] == list(range(32))
    assert steps(own, (1, 4), 2, skip=2) == whole[2:]
    assert steps(own, (2, 2), 1, kind="valid", skip=1) == [[[108 + i] * SEQ for i in range(8)]]
    assert iterators(own).test is None
    first, second = iterators(own, chunks=2).train  # of two model chunks
    assert next(first)["tokens"].tolist() == next(second)["tokens"].tolist()


@pytest.mark.parametrize("kind", ["single", "cyclic"])
def test_every_layout_sees_the_same_steps(data: dict[str, str], tmp_path: Path, kind: str) -> None:
    given = args(tmp_path, data_path=[data["low"]], dataloader_type=kind)
    whole = steps(given, (2, 1), 12)
    for layout in ((1, 1), (8, 1), (1, 2), (2, 4), (1, 8)):
        assert steps(given, layout, 12) == whole
        assert steps(given, layout, 5, skip=7) == whole[7:]


def test_every_layout_sees_the_same_conversations(tmp_path: Path) -> None:
    """Over several passes, whose order differs, and in sets of their own for validation."""
    valid = [str(write_talks(tmp_path / f"{name}.jsonl", 9, seed=7)) for name in ("one", "two")]
    given = args(
        tmp_path,
        split=None,
        train_data_path=[str(write_talks(tmp_path / "talks.jsonl", 90))],
        valid_data_path=valid,
        multiple_validation_sets=True,
        tokenizer_path=str(write_tokenizer(tmp_path / "tokenizer")),
        seq_length=256,
        **{"sft": True, "sft_format": "auto", "sft_packing": True, "sft_too_long": "refuse"},
        chat_template=None,
    )
    whole = steps(given, (2, 1), 12)
    assert len({str(row) for step in whole for row in step}) < 12 * 8
    assert whole[:6] != whole[6:]
    for layout in ((1, 1), (8, 1), (2, 4)):
        assert steps(given, layout, 5, skip=7) == whole[7:]
    found = iterators(given)
    assert (found.valid, found.test, list(found.validations)) == (None, None, ["one", "two"])


def test_evaluation_resumes_too(data: dict[str, str], tmp_path: Path) -> None:
    given = args(tmp_path, data_path=[data["low"]])
    whole = steps(given, (2, 1), 6, kind="valid")
    assert steps(given, (1, 4), 3, skip=3, kind="valid") == whole[3:]
    assert len(steps(given, (2, 1), 2, kind="test")) == 2


def test_validation_sets_are_each_by_itself(data: dict[str, str], tmp_path: Path) -> None:
    own = {"train_data_path": [data["high"]], "valid_data_path": [data["low"], data["high"]]}
    given = args(tmp_path, **own, split=None, multiple_validation_sets=True)
    found = iterators(given, Progress(3, 24, 24))
    assert found.valid is None
    names = [Path(prefix).name for prefix in own["valid_data_path"]]
    assert list(found.validations) == names
    alone = args(tmp_path, **{**own, "valid_data_path": [data["low"]]}, split=None)
    expected = iterators(alone, Progress(3, 24, 24)).valid
    for _ in range(4):
        digits = next(found.validations[names[1]])["tokens"]
        assert not any(ord("a") <= token <= ord("z") for token in digits.flatten().tolist())
        letters = next(found.validations[names[0]])["tokens"]
        assert letters.tolist() == next(expected)["tokens"].tolist()
    trained = [next(found.train)["tokens"].tolist() for _ in range(4)]
    without = iterators(args(tmp_path, **own, split=None), Progress(3, 24, 24)).train
    assert trained == [next(without)["tokens"].tolist() for _ in range(4)]


def test_blends_keep_their_weights(data: dict[str, str], tmp_path: Path) -> None:
    values = [str(part) for part in ("0.25", data["low"], "0.75", data["high"])]
    rows = [row for step in steps(args(tmp_path, data_path=values), (2, 1), 12) for row in step]
    letters = sum(np.median(row) >= ord("a") for row in rows)
    assert letters == pytest.approx(len(rows) / 4, abs=3)


def test_mixtures_change_where_they_are_to(data: dict[str, str], tmp_path: Path) -> None:
    """In mid-step; the same in every layout, before and after a restart, in either phase."""
    low, high = data["low"], data["high"]
    phases = [f"samples=36 0.25 '{low}' 0.75 '{high}'", f"tokens={72 * SEQ} '{low}'"]
    given = args(tmp_path, data_path=["0.75", low, "0.25", high], data_phases=phases)
    whole = steps(given, (2, 1), 12)
    rows = [row for step in whole for row in step]
    letters = [bool(np.median(row) >= ord("a")) for row in rows]
    counts = [sum(letters[a:b]) for a, b in ((0, 36), (36, 72), (72, 96))]
    assert counts == [27, 9, 24]
    for layout, taken in (((1, 1), 2), ((2, 4), 5), ((8, 1), 9)):
        assert steps(given, layout, 12 - taken, skip=taken) == whole[taken:]
    assert len(steps(given, (2, 1), 2, kind="valid")) == 2
    assert len(list((tmp_path / "cache").rglob("*-phases-*.npy"))) == 2


def test_a_blend_without_weights_is_passed_through_once(
    data: dict[str, str], tmp_path: Path
) -> None:
    paths = [data["low"], data["high"]]
    with pytest.raises(DataError, match="passed through once"):
        iterators(args(tmp_path, data_path=paths, train_iters=1000))
    cyclic = args(tmp_path, data_path=paths, train_iters=1000, dataloader_type="cyclic")
    assert len(steps(cyclic, (2, 1), 100)) == 100


def test_each_split_its_own_data(data: dict[str, str], tmp_path: Path) -> None:
    given = args(
        tmp_path, split=None, train_data_path=[data["low"]], valid_data_path=[data["high"]]
    )
    found = iterators(given)
    assert int(next(found.train)["tokens"].median()) >= ord("a")
    assert int(next(found.valid)["tokens"].median()) < ord("a")
    assert found.test is None


def test_chunks_get_the_same_batches(data: dict[str, str], tmp_path: Path) -> None:
    given = args(tmp_path, data_path=[data["low"]])
    alone = [batch["tokens"].tolist() for batch in islice(iterators(given).train, 6)]
    one, two = iterators(given, chunks=2).train
    ahead = [next(one)["tokens"].tolist() for _ in range(4)]  # one chunk runs ahead
    other = [next(two)["tokens"].tolist() for _ in range(6)]
    assert ahead + [next(one)["tokens"].tolist() for _ in range(2)] == other == alone
    assert next(one) is not next(two)


def test_loader_processes_give_the_same(data: dict[str, str], tmp_path: Path) -> None:
    given = args(tmp_path, data_path=[data["low"]])
    whole = steps(given, (2, 1), 4)
    given.num_workers = 2
    assert steps(given, (2, 1), 4) == whole


def test_loader_processes_outlive_a_stop_request_but_not_their_rank(
    data: dict[str, str], tmp_path: Path
) -> None:
    given = args(tmp_path, data_path=[data["low"]])
    alone = [batch["tokens"].tolist() for batch in iterators(given).train]
    given.num_workers = 1
    before = set(multiprocessing.active_children())
    train = iterators(given).train
    taken = [next(train)["tokens"].tolist()]
    workers = set(multiprocessing.active_children()) - before
    assert workers
    for worker in workers:
        os.kill(worker.pid or 0, signal.SIGTERM)
    taken += [batch["tokens"].tolist() for batch in train]
    assert taken == alone
    del train
    gc.collect()
    for worker in workers:
        worker.join(20)
        assert not worker.is_alive()


def test_mock_data(tmp_path: Path) -> None:
    found = iterators(args(tmp_path, mock_data=True, split=None))
    assert next(found.train)["tokens"].shape == (2, SEQ)
    assert next(found.valid)["tokens"].shape == (2, SEQ)


def test_a_masked_model_sees_the_same_steps_in_every_layout(
    data: dict[str, str], tmp_path: Path
) -> None:
    given = args(tmp_path, data_path=[data["low"]], family="bert", mask_prob=0.25)
    whole = steps(given, (2, 1), 12)
    assert any(SPEC_MASK in row for step in whole for row in step)
    for layout in ((8, 1), (1, 4)):
        assert steps(given, layout, 5, skip=7) == whole[7:]


def test_a_masked_batch(data: dict[str, str], tmp_path: Path) -> None:
    given = args(tmp_path, data_path=[data["low"]], family="bert", mask_prob=0.25)
    batch = next(iterators(given).train)
    assert {key: tuple(value.shape) for key, value in batch.items()} == dict.fromkeys(
        ("tokens", "labels", "loss_mask", "position_ids"), (2, SEQ)
    )
    assert batch["loss_mask"].sum(1).tolist() == [SEQ / 4] * 2
    told = batch["loss_mask"] > 0
    assert batch["tokens"][~told].eq(batch["labels"][~told]).all()
    assert batch["labels"][told].ne(256).all()  # the end of a document


def test_an_epoch_later_other_tokens_are_masked(data: dict[str, str], tmp_path: Path) -> None:
    """One sequence is all there is to read, again and again."""
    given = args(
        tmp_path, data_path=[data["low"]], family="bert", mask_prob=0.25, split="1,0,0",
        seq_length=2900, train_iters=3, global_batch_size=1, micro_batch_size=1, eval_iters=0,
    )  # fmt: skip
    every = list(islice(iterators(given).train, 3))
    chosen = {tuple(batch["loss_mask"][0].nonzero().squeeze(1).tolist()) for batch in every}
    assert len(chosen) == 3


def test_options_of_documents(data: dict[str, str], tmp_path: Path) -> None:
    given = args(
        tmp_path,
        data_path=[data["low"]],
        seq_length=64,
        reset_position_ids=True,
        eod_mask_loss=True,
        mmap_bin_files=False,
    )
    batch = next(iterators(given).train)
    ends = batch["tokens"] == 256
    assert bool(ends.any())
    assert batch["loss_mask"][ends].eq(0).all()
    assert int(batch["position_ids"].max()) < 63


def test_data_written_anew_is_not_read_through_an_old_cache(tmp_path: Path) -> None:
    source = tmp_path / "text.txt"
    found = []
    for letter in "ab":
        source.write_text(f"{letter * 30}\n" * (40 if letter == "a" else 20))
        job = Job((source,), str(tmp_path / "set"), SPEC, format="lines", overwrite=True)
        prefix = run(job).prefixes[0]
        found.append(steps(args(tmp_path, data_path=[prefix], eval_iters=0), (2, 1), 12))
    assert {token for step in found[1] for row in step for token in row} == {ord("b")}


def test_a_cut_cache_is_named(data: dict[str, str], tmp_path: Path) -> None:
    given = args(tmp_path, data_path=[data["low"]])
    iterators(given)
    for path in (tmp_path / "cache").rglob("*shuffle_index.npy"):
        path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DataError, match="index cache cannot be read"):
        iterators(given)


@pytest.mark.parametrize(
    ("given", "hint"),
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
    data: dict[str, str], tmp_path: Path, given: dict[str, str | None], hint: str
) -> None:
    (tmp_path / "file").touch()
    places = {name: value and str(tmp_path / value) for name, value in given.items()}
    with pytest.raises(DataError, match="index cache cannot be written") as error:
        iterators(args(tmp_path, data_path=[data["low"]], **places))
    assert (error.value.hint or "").startswith(hint)
