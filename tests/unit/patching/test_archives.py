"""Tests with archives that try to write outside their directory."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from flagscale.errors import BackendSourceError
from flagscale.patching.archive import copy_tree, pack, stays_inside, unpack
from flagscale.patching.manifest import scan_tree


def member(
    name: str, *, link: str | None = None, kind: bytes | None = None, mode: int = 0o644
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.mode = mode
    content = b""
    if link is not None:
        info.type, info.linkname = kind or tarfile.SYMTYPE, link
    elif kind is not None:
        info.type = kind
    else:
        content = f"content of {name}\n".encode()
        info.size = len(content)
    return info, content


def archive(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return path


HOSTILE = {
    "absolute": [member("/etc/evil")],
    "parent": [member("top/../../evil")],
    "hidden-parent": [member("top/a/../../../evil")],
    "absolute-link": [member("top/l", link="/etc")],
    "link-out": [member("top/a/l", link="../../evil")],
    "link-out-through-a-link": [
        member("top/a/b/d", link="../../c"),
        member("top/x", link="a/b/d/../../evil"),
    ],
    "file-through-link": [member("top/l", link="sub"), member("top/l/evil")],
    "hard-link": [member("top/l", link="/etc/passwd", kind=tarfile.LNKTYPE)],
    "device": [member("top/d", kind=tarfile.CHRTYPE)],
    "fifo": [member("top/f", kind=tarfile.FIFOTYPE)],
    "twice": [member("top/a"), member("top/a")],
    "file-below-file": [member("top/a"), member("top/a/b")],
    "two-tops": [member("top/a"), member("other/a")],
    "nothing": [],
}


@pytest.mark.parametrize("members", HOSTILE.values(), ids=HOSTILE.keys())
def test_unsafe_archive_is_rejected_before_extraction(
    tmp_path: Path, members: list[tuple[tarfile.TarInfo, bytes]]
) -> None:
    target = tmp_path / "inner" / "out"
    with pytest.raises(BackendSourceError) as error:
        unpack(archive(tmp_path / "a.tar.gz", *members), target)
    assert "a.tar.gz" in str(error.value)
    assert not target.exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.tar.gz"]


def test_ordinary_archive(tmp_path: Path) -> None:
    archive_path = archive(
        tmp_path / "a.tar.gz",
        member("./top/a b$'ü.py"),
        member("top/run.sh", mode=0o4775),
        member("top/sub/link", link="../run.sh"),
        member("top/thing.egg-info/PKG-INFO"),
    )
    unpack(archive_path, tmp_path / "out")
    extracted = scan_tree(tmp_path / "out")
    assert list(extracted) == ["a b$'ü.py", "run.sh", "sub/link"]
    assert extracted["run.sh"].startswith("x:")
    assert extracted["sub/link"] == "link:../run.sh"
    assert (tmp_path / "out/run.sh").stat().st_mode & 0o7777 == 0o755


def test_damaged_archive_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_bytes(b"\x1f\x8b not really")
    with pytest.raises(BackendSourceError, match=r"a\.tar\.gz: not a readable tar archive"):
        unpack(tmp_path / "a.tar.gz", tmp_path / "out")


def test_truncated_archive_is_named(tmp_path: Path) -> None:
    archive_path = archive(tmp_path / "a.tar.gz", *(member(f"top/{i}") for i in range(200)))
    archive_path.write_bytes(archive_path.read_bytes()[:900])
    with pytest.raises(BackendSourceError, match="not a readable tar archive"):
        unpack(archive_path, tmp_path / "out")


@pytest.mark.parametrize(
    ("link", "target", "inside"),
    [
        ("a", "b", True),
        ("a/b", "../c", True),
        ("a/b", "../../c", False),
        ("a", "/c", False),
        ("a", "..", False),
        ("a/b", "./../c", True),
        ("a", "b/../../c", False),
    ],
)
def test_links_must_stay_inside_the_tree(link: str, target: str, inside: bool) -> None:
    assert stays_inside(link, target) is inside


def test_copy_skips_caches_and_rejects_links_to_outside(tmp_path: Path) -> None:
    source = tmp_path / "s"
    (source / "__pycache__").mkdir(parents=True)
    (source / "__pycache__/a.pyc").write_bytes(b"x")
    (source / ".git").mkdir()
    (source / ".git/config").write_text("x")
    (source / "a.py").write_text("x")
    copy_tree(source, tmp_path / "copy")
    assert [p.name for p in (tmp_path / "copy").iterdir()] == ["a.py"]
    (source / "out").symlink_to("../elsewhere")
    with pytest.raises(BackendSourceError, match="leads outside"):
        copy_tree(source, tmp_path / "copy2")


def test_pack_and_unpack_give_the_same_tree(tmp_path: Path) -> None:
    source = tmp_path / "s"
    (source / "d").mkdir(parents=True)
    (source / "d/x").write_bytes(b"\0\r\n")
    (source / "d/x").chmod(0o755)
    (source / "l").symlink_to("d/x")
    pack(source, scan_tree(source), tmp_path / "p.tar.gz")
    unpack(tmp_path / "p.tar.gz", tmp_path / "out")
    assert scan_tree(tmp_path / "out") == scan_tree(source)
