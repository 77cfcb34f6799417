"""Tests that collected edits are restored byte for byte in a new tree."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flagscale.errors import BackendSourceError
from flagscale.patching.collect import collect
from flagscale.patching.manifest import scan_tree
from flagscale.patching.unpatch import patch_digests

from .conftest import Project, write_file


def unpatch_afresh(project: Project) -> dict[str, str]:
    """Return the files of a tree that unpatch builds from nothing."""
    shutil.rmtree(project.tree)
    project.unpatch()
    return scan_tree(project.tree)


def test_modified_new_and_deleted_files(project: Project) -> None:
    project.unpatch()
    work = project.tree / "tiny/work.py"
    work.write_text(work.read_text().replace("return 1", "return 2"))
    write_file(project.tree / "tiny/new dir/n€w $file.txt", "a\r\nb")
    (project.tree / "README.md").unlink()
    (project.tree / "tiny/kernels/fast.py").chmod(0o755)
    (project.tree / "link").symlink_to("tiny/work.py")
    edited_scan = scan_tree(project.tree)
    collected = collect(project.layout, message="Return two.\nBecause one is lonely.")
    assert collected.written == (
        "README.md.patch",
        "link.patch",
        "tiny/kernels/fast.py.patch",
        "tiny/new dir/n€w $file.txt.patch",
        "tiny/work.py.patch",
    )
    patch = (project.layout.patches / "tiny/work.py.patch").read_text()
    assert patch.startswith("# Return two.\n# Because one is lonely.\n\ndiff --git a/tiny/work.py")
    assert "-    return 1\n+    return 2\n" in patch
    assert "torch.cuda" not in patch, "what the codemods do is not part of a patch"
    assert unpatch_afresh(project) == edited_scan


def test_is_idempotent_and_leaves_unpatch_nothing_to_do(project: Project) -> None:
    project.unpatch()
    write_file(project.tree / "README.md", "mine\n")
    collect(project.layout, message="Mine.")
    stored = patch_digests(project.layout)
    outcome = project.unpatch()
    assert not outcome.was_built
    assert not outcome.edits
    second_result = collect(project.layout, message="Another message for nothing new.")
    assert (second_result.written, second_result.removed) == ((), ())
    assert second_result.unchanged == ("README.md.patch",)
    assert patch_digests(project.layout) == stored


def test_header_stays_when_the_edit_grows(project: Project) -> None:
    project.unpatch()
    write_file(project.tree / "README.md", "mine\n")
    collect(project.layout, message="Mine.")
    write_file(project.tree / "README.md", "mine, more\n")
    collect(project.layout)
    assert (project.layout.patches / "README.md.patch").read_text().startswith("# Mine.\n\ndiff")


def test_reverted_edit_removes_its_patch(project: Project) -> None:
    project.unpatch()
    write_file(project.tree / "tiny/sub/new.py", "x = 1\n")
    collect(project.layout)
    shutil.rmtree(project.tree / "tiny/sub")
    collected = collect(project.layout)
    assert collected.removed == ("tiny/sub/new.py.patch",)
    assert not list(project.layout.patches.iterdir())


def test_patches_not_applied_to_the_tree_are_not_overwritten(project: Project) -> None:
    project.unpatch()
    write_file(project.layout.patches / "vendor.patch", "a colleague's")
    with pytest.raises(BackendSourceError, match=r"new: vendor\.patch") as error:
        collect(project.layout)
    assert "unpatch.py --backend tiny" in str(error.value)
    assert (project.layout.patches / "vendor.patch").read_text() == "a colleague's"
    assert collect(project.layout, force=True).removed == ("vendor.patch",)


def test_collecting_does_not_mark_an_outdated_tree_as_current(project: Project) -> None:
    project.unpatch()
    write_file(project.tree / "README.md", "mine\n")
    (project.layout.definition / "codemods.yaml").write_text("rules: []\n")
    with pytest.raises(BackendSourceError, match=r"modified: README\.md"):
        project.unpatch()
    collect(project.layout)
    outcome = project.unpatch()
    assert outcome.was_built
    assert outcome.backup is None
    assert "torch.cuda" in (project.tree / "tiny/work.py").read_text()
    assert (project.tree / "README.md").read_text() == "mine\n"


def test_edit_that_does_not_compile_is_rejected(project: Project) -> None:
    project.unpatch()
    write_file(project.tree / "tiny/work.py", "x = 1\ndef f(:\n")
    with pytest.raises(BackendSourceError, match=r"tiny/work\.py:2: does not compile"):
        collect(project.layout)
    assert not project.layout.patches.exists()


def test_missing_tree_is_an_error_with_a_hint(project: Project) -> None:
    with pytest.raises(BackendSourceError, match=r"run tools/patch/unpatch\.py --backend tiny"):
        collect(project.layout)


NAMES = st.sampled_from(
    ["a.txt", "tiny/b.txt", "tiny/data/c d.txt", "x/ü'$\"`.txt", "x/-n.txt", "tiny/work.py"]
)
CONTENTS = st.one_of(
    st.just(b""),
    st.binary(max_size=40),
    st.lists(st.sampled_from([b"one\n", b"two\r\n", b" \n", b"\n", b"end"]), max_size=12).map(
        b"".join
    ),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    source=st.dictionaries(NAMES.filter(lambda n: not n.endswith(".py")), CONTENTS, max_size=4),
    edits=st.dictionaries(NAMES, st.one_of(st.none(), CONTENTS), max_size=4),
    executable=st.sets(NAMES, max_size=2),
)
def test_any_edit_round_trips(
    source: dict[str, bytes],
    edits: dict[str, bytes | None],
    executable: set[str],
) -> None:
    edits = {n: c for n, c in edits.items() if c is None or not n.endswith(".py")}
    with tempfile.TemporaryDirectory() as root:
        project = Project(Path(root))
        for name, content in source.items():
            write_file(project.source / name, content)
        project.unpatch()
        for name, edit in edits.items():
            if edit is not None:
                write_file(project.tree / name, edit)
            elif (project.tree / name).exists():
                (project.tree / name).unlink()
        for name in executable:
            if (project.tree / name).exists():
                (project.tree / name).chmod(0o755)
        edited_scan = scan_tree(project.tree)
        collect(project.layout)
        assert not project.unpatch().was_built
        assert unpatch_afresh(project) == edited_scan
        assert collect(project.layout).written == ()
