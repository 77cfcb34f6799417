"""Addresses of object storage, and its client."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale import object_storage
from flagscale.errors import CheckpointError
from flagscale.object_storage import (
    ObjectStore,
    StorageAddress,
    explain_unusable,
    is_address,
    join_ranges,
    parse_location,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("s3://bucket/a", True, id="s3"),
        pytest.param("my+store.v1-x://a", True, id="any-scheme"),
        pytest.param("/s3://bucket", False, id="absolute"),
        pytest.param("checkpoints/a://b", False, id="relative"),
        pytest.param("s3:/bucket", False, id="one-slash"),
        pytest.param("://a", False, id="no-scheme"),
        pytest.param("", False, id="empty"),
    ],
)
def test_addresses_and_paths(text: str, expected: bool) -> None:
    assert is_address(text) is expected
    location = parse_location(text)
    assert isinstance(location, StorageAddress) is expected
    assert expected or location == Path(text)


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        pytest.param("s3://bucket", None, id="bucket"),
        pytest.param("s3://bucket/a/b/", None, id="prefix"),
        pytest.param("abfs://container@account.dfs.core.windows.net/a", None, id="azure"),
        pytest.param("s3://bucket/a:b@c", None, id="at-sign-in-the-prefix"),
        pytest.param("file:///data/a", None, id="file"),
        pytest.param("s3://user:xyzzy@bucket/a", "a user and a password is refused", id="password"),
        pytest.param("s3://bucket/a?token=xyzzy", "without ? and #", id="query"),
        pytest.param("s3://bucket/a#xyzzy", "without ? and #", id="fragment"),
        pytest.param("memory://a", "as long as one process", id="memory"),
        pytest.param("https://host/a", "cannot be written", id="https"),
        pytest.param("simplecache::s3://b/xyzzy", "several chained by ::", id="chained-scheme"),
        pytest.param("s3://b/xyzzy::c", "several chained by ::", id="chained"),
        pytest.param("s3:///", "found no bucket", id="no-bucket"),
    ],
)
def test_unusable_addresses(address: str, reason: str | None) -> None:
    if address.startswith("simplecache"):
        assert not is_address(address)
        return
    found = explain_unusable(address)
    assert (found is None) is (reason is None)
    assert (reason or "") in (found or "")
    assert "xyzzy" not in (found or "")  # the reason does not repeat what may be secret


ranges = st.lists(st.tuples(st.integers(0, 500), st.integers(1, 40)), max_size=20).map(
    lambda items: sorted({(begin, begin + length) for begin, length in items})
)


@given(ranges, st.integers(0, 30), st.integers(1, 100))
def test_joined_ranges(items: list[tuple[int, int]], max_gap: int, max_bytes: int) -> None:
    joined = join_ranges(items, max_gap=max_gap, max_bytes=max_bytes)
    for begin, end in items:
        assert any(low <= begin and end <= high for low, high in joined)
    for low, high in joined:
        parts = [item for item in items if low <= item[0] and item[1] <= high]
        assert high - low <= max_bytes or (low, high) in items
        # Bytes that nobody needs are within gaps.
        needed = {position for begin, end in parts for position in range(begin, end)}
        unneeded_run = 0
        for position in range(low, high):
            unneeded_run = 0 if position in needed else unneeded_run + 1
            assert unneeded_run <= max_gap


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    pytest.importorskip("fsspec")
    return ObjectStore(StorageAddress.parse(f"file://{tmp_path / 'store'}"))


def test_objects(store: ObjectStore, tmp_path: Path) -> None:
    assert store.list_sizes(store.address) == {}
    store.write(store.address / "a/b", b"0123456789")
    (tmp_path / "file").write_bytes(b"xyz")
    store.upload(tmp_path / "file", store.address / "a/c")
    assert store.list_sizes(store.address) == {"a/b": 10, "a/c": 3}
    assert store.list_sizes(store.address / "a") == {"b": 10, "c": 3}
    assert store.read(store.address / "a/b", 2, 5) == b"234"
    with pytest.raises(CheckpointError, match="ends before byte 20"):
        store.read(store.address / "a/b", 2, 20)
    store.delete([store.address / "a/b", store.address / "a/nothing"])
    assert store.list_sizes(store.address) == {"a/c": 3}
    with pytest.raises(FileNotFoundError):
        store.read(store.address / "a/b")


def test_errors_are_one_sentence_without_secrets(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-long-secret-key")
    (tmp_path / "store").write_text("")  # where the directory would be
    with pytest.raises(CheckpointError) as error:
        store.write(store.address / "b", b"")
    assert error.value.message.startswith(f"{store.address}/b: ")
    assert "\n" not in error.value.message
    text = "GET https://u:p@host/a?X-Amz-Signature=abc failed for a-long-secret-key\nmore"
    described = object_storage._describe_without_secrets(RuntimeError(text))
    assert described == "RuntimeError: GET https://host/a failed for <hidden>"


def test_probe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("fsspec")
    address = f"file://{tmp_path / 'new'}"
    assert object_storage.main([address]) == 0
    assert json.loads(capsys.readouterr().out) == {"found": f"{address} can be listed and written"}
    assert list((tmp_path / "new").iterdir()) == []
    unknown = object_storage.probe("nostorage://a/b")
    assert "nostorage:// cannot be used" in unknown["problem"]
    assert "pip install" in unknown["hint"]
