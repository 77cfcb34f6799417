"""Tests of unpatch on a small backend: results, repeated runs and rejected sources."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flagscale.errors import BackendSourceError, ConfigError
from flagscale.patching import adapt
from flagscale.patching import unpatch as module
from flagscale.patching.manifest import read_manifest, scan_tree
from flagscale.patching.sources import SourceOptions
from flagscale.patching.spec import BackendLayout, cache_directory, load_spec
from flagscale.patching.unpatch import unpatch

from .conftest import Project, write_file

SAID = "accelerator.current_device()"


def ignore_line(line: str) -> None:
    """Discard a line about a step."""


def test_unpatch_creates_an_adapted_tree(project: Project) -> None:
    write_file(project.layout.files / "tiny/device.py", "def current_device():\n    return 0\n")
    outcome = project.unpatch()
    assert outcome.was_built
    assert SAID in (project.tree / "tiny/work.py").read_text()
    assert "torch.cuda" in (project.tree / "tiny/kernels/fast.py").read_text()
    assert (project.tree / "tiny/device.py").is_file()
    assert (project.tree / "tiny/data/notes ü $x.txt").read_text() == "one\ntwo\nthree\n"
    manifest = outcome.manifest
    assert (manifest.version, manifest.rewritten_files) == ("1.2.3", 1)
    assert manifest.codemods == {"cuda-calls": 1}
    assert read_manifest(project.layout.manifest) == manifest


def test_bytecode_is_compiled_for_the_final_place(project: Project) -> None:
    project.unpatch()
    compiled = next((project.tree / "tiny/__pycache__").glob("work*.pyc"))
    assert str(project.tree / "tiny/work.py").encode() in compiled.read_bytes()
    assert b"building" not in compiled.read_bytes()


def test_second_run_does_nothing(project: Project) -> None:
    first = project.unpatch()
    inode = project.tree.stat().st_ino
    second = project.unpatch()
    assert not second.was_built
    assert second.manifest == first.manifest
    assert project.tree.stat().st_ino == inode


def test_without_options_the_tree_keeps_its_source(project: Project) -> None:
    project.unpatch()
    assert not unpatch(project.layout, SourceOptions(), report_step=ignore_line).was_built


@pytest.mark.parametrize(
    "change",
    ["source", "codemods", "patch", "file"],
)
def test_changed_input_rebuilds_the_tree(project: Project, change: str) -> None:
    project.unpatch()
    if change == "source":
        write_file(project.source / "tiny/new.py", "x = 1\n")
    elif change == "codemods":
        (project.layout.definition / "codemods.yaml").write_text("rules: []\n")
    elif change == "patch":
        write_file(project.layout.patches / "README.md.patch", README_PATCH)
    else:
        write_file(project.layout.files / "tiny/own.py", "x = 1\n")
    assert project.unpatch().was_built
    assert not project.unpatch().was_built


README_PATCH = """\
# Say hello.

diff --git a/README.md b/README.md
--- a/README.md
+++ b/README.md
@@ -1 +1,2 @@
 # tiny
+hello
"""


def test_patches_are_applied_after_the_codemods(project: Project) -> None:
    patch = (
        "--- a/tiny/work.py\n+++ b/tiny/work.py\n@@ -4,4 +4,4 @@\n \n def work():\n"
        f"-    return {SAID}\n+    return 7\n \n"
    )
    write_file(project.layout.patches / "work.patch", patch)
    write_file(project.layout.patches / "more/README.md.patch", README_PATCH)
    outcome = project.unpatch()
    assert "return 7" in (project.tree / "tiny/work.py").read_text()
    assert (project.tree / "README.md").read_text() == "# tiny\nhello\n"
    assert list(outcome.manifest.patches) == ["more/README.md.patch", "work.patch"]


class TestLocalEdits:
    """An uncollected edit survives every unpatch."""

    def test_edits_are_preserved_if_no_input_changed(self, project: Project) -> None:
        project.unpatch()
        write_file(project.tree / "README.md", "mine\n")
        outcome = project.unpatch()
        assert not outcome.was_built
        assert outcome.edits.format_lines() == ["modified: README.md"]
        assert (project.tree / "README.md").read_text() == "mine\n"

    def test_edited_files_are_named_if_the_tree_must_be_rebuilt(self, project: Project) -> None:
        project.unpatch()
        write_file(project.tree / "README.md", "mine\n")
        write_file(project.tree / "tiny/mine.py", "x = 1\n")
        (project.tree / "tiny/kernels/fast.py").unlink()
        scan_before = scan_tree(project.tree)
        write_file(project.source / "tiny/new.py", "x = 1\n")
        with pytest.raises(BackendSourceError) as error:
            project.unpatch()
        for line in (
            "modified: README.md",
            "new: tiny/mine.py",
            "deleted: tiny/kernels/fast.py",
        ):
            assert line in str(error.value)
        assert "patch.py --backend tiny" in str(error.value)
        assert scan_tree(project.tree) == scan_before

    def test_force_keeps_a_backup_each_time(self, project: Project) -> None:
        project.unpatch()
        for number in (1, 2):
            write_file(project.tree / "README.md", f"mine {number}\n")
            outcome = project.unpatch(force=True)
            assert outcome.backup == project.tree.with_name(f"tiny.backup-{number}")
            assert (outcome.backup / "README.md").read_text() == f"mine {number}\n"
            assert (project.tree / "README.md").read_text() == "# tiny\n"

    def test_caches_and_editor_files_are_not_edits(self, project: Project) -> None:
        project.unpatch()
        for name in ("tiny/__pycache__/x.pyc", "tiny/work.py.orig", ".mypy_cache/x", "a~"):
            write_file(project.tree / name, "x")
        assert not project.unpatch().edits

    def test_directory_of_other_origin_is_not_touched(self, project: Project) -> None:
        write_file(project.tree / "precious.py", "x = 1\n")
        with pytest.raises(BackendSourceError, match="not by this tool"):
            project.unpatch()
        outcome = project.unpatch(force=True)
        assert outcome.backup is not None
        assert (outcome.backup / "precious.py").is_file()


class TestFailuresLeaveTheTree:
    """Any failure leaves the tree unchanged and no other files next to it."""

    @pytest.fixture
    def tree_before(self, project: Project) -> dict[str, str]:
        project.unpatch()
        return scan_tree(project.tree)

    @pytest.fixture(autouse=True)
    def _expect_no_change(self, project: Project, tree_before: dict[str, str]) -> object:
        yield
        assert scan_tree(project.tree) == tree_before
        beside = {p.name for p in project.tree.parent.iterdir()}
        assert beside <= {"tiny", ".tiny.lock"}

    def test_patch_that_no_longer_applies(self, project: Project) -> None:
        patch = README_PATCH.replace(" # tiny\n", " # tinny\n")
        write_file(project.layout.patches / "README.md.patch", patch)
        with pytest.raises(BackendSourceError) as error:
            project.unpatch()
        message = str(error.value)
        assert "README.md.patch: the patch no longer applies" in message
        assert "README.md: hunk 1 of 1 (@@ -1 +1,2 @@) does not fit" in message
        assert "line 1: expected '# tinny'" in message
        assert "found    '# tiny'" in message

    def test_patch_that_writes_outside(self, project: Project, tmp_path: Path) -> None:
        patch = "--- /dev/null\n+++ b/../../../evil\n@@ -0,0 +1 @@\n+x\n"
        write_file(project.layout.patches / "evil.patch", patch)
        with pytest.raises(BackendSourceError, match="invalid path"):
            project.unpatch()
        assert not list(tmp_path.rglob("evil"))

    def test_patch_that_breaks_a_file(self, project: Project) -> None:
        patch = "--- a/tiny/version.py\n+++ b/tiny/version.py\n@@ -1 +1,2 @@\n"
        patch += ' __version__ = "1.2.3"\n+def (:\n'
        write_file(project.layout.patches / "v.patch", patch)
        with pytest.raises(BackendSourceError, match=r"tiny/version\.py:2: does not compile"):
            project.unpatch()

    def test_source_that_is_not_the_backend(self, project: Project) -> None:
        (project.source / "tiny/version.py").unlink()
        with pytest.raises(BackendSourceError, match=r"not tiny: it has no tiny/version\.py"):
            project.unpatch()
        write_file(project.source / "tiny/version.py", '__version__ = "1.2.3"\n')

    def test_added_file_that_exists_upstream(self, project: Project) -> None:
        write_file(project.layout.files / "tiny/work.py", "x = 1\n")
        with pytest.raises(BackendSourceError, match=r"already has tiny/work\.py"):
            project.unpatch()

    def test_full_disk_is_reported(self, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
        def raise_no_space(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "x.py")

        write_file(project.source / "tiny/new.py", "x = 1\n")
        monkeypatch.setattr(module, "pack", raise_no_space)
        with pytest.raises(BackendSourceError, match=r"no space left on the disk; .* is unchanged"):
            project.unpatch()


def test_interrupted_replacement_is_recovered(project: Project) -> None:
    project.unpatch()
    project.tree.rename(project.layout.sibling("old"))
    assert not project.unpatch().was_built
    assert (project.tree / "README.md").is_file()


KILLED_BEFORE_RENAME = """
import os, signal, sys
from pathlib import Path
from flagscale.patching.sources import SourceOptions
from flagscale.patching.spec import BackendLayout
from flagscale.patching.unpatch import unpatch

count = int(sys.argv[2])

def kill_before_rename(event, arguments):
    global count
    if event == "os.rename" and Path(arguments[0]).parent == layout.tree.parent:
        count -= 1
        if count == 0:
            os.kill(os.getpid(), signal.SIGKILL)

layout = BackendLayout(Path(sys.argv[1]), "tiny")
sys.addaudithook(kill_before_rename)
unpatch(layout, SourceOptions(), force=True, report_step=lambda line: None)
"""


@pytest.mark.parametrize("rename", [1, 2, 3, 4])
@pytest.mark.parametrize("edited", [True, False])
def test_killed_forced_replacement_loses_neither_edits_nor_source(
    project: Project, rename: int, edited: bool
) -> None:
    project.unpatch()
    if edited:
        write_file(project.tree / "README.md", "mine\n")
    else:
        write_file(project.source / "tiny/new.py", "x = 1\n")
    argv = [sys.executable, "-c", KILLED_BEFORE_RENAME, str(project.layout.root), str(rename)]
    returncode = subprocess.run(argv, check=False).returncode
    assert returncode == (-signal.SIGKILL if rename < 4 else 0)
    # Without options, the source is that of the existing tree. Its registry source does not exist.
    outcome = unpatch(project.layout, SourceOptions(), force=True, report_step=ignore_line)
    assert outcome.manifest.source == str(project.source)
    backups = sorted(project.tree.parent.glob("tiny.backup-*"))
    assert [(path / "README.md").read_text() for path in backups] == ["mine\n"] * edited
    assert (project.tree / "README.md").read_text() == "# tiny\n"
    assert (project.tree / "tiny/new.py").exists() is not edited
    names = {path.name for path in project.tree.parent.iterdir()}
    assert names == {"tiny", ".tiny.lock", *(path.name for path in backups)}


def test_unknown_backend_suggests_the_closest_name(project: Project) -> None:
    layout = replace(project.layout, backend="tinny")
    with pytest.raises(ConfigError) as error:
        unpatch(layout, SourceOptions(), report_step=ignore_line)
    assert error.value.exit_code == 2
    assert str(error.value) == (
        "unknown backend 'tinny'; known: tiny\n  hint: did you mean --backend tiny?"
    )


def test_unknown_codemod_suggests_the_closest_name(project: Project) -> None:
    text = "rules:\n  - {codemods: [cuda-cals], include: ['*']}\n"
    (project.layout.definition / "codemods.yaml").write_text(text)
    with pytest.raises(BackendSourceError, match="did you mean 'cuda-calls'"):
        load_spec(project.layout)


@pytest.mark.parametrize("text", ["[1]", "a: b: c", "name: x", "\tname: x"])
def test_broken_definition_is_named(project: Project, text: str) -> None:
    (project.layout.definition / "backend.yaml").write_text(text)
    with pytest.raises(BackendSourceError, match=r"backend\.yaml: "):
        load_spec(project.layout)


@pytest.mark.parametrize("content", ["", "[]", '{"format": 99}'])
def test_unreadable_record_requires_force(project: Project, content: str) -> None:
    project.unpatch()
    project.layout.manifest.write_text(content)
    with pytest.raises(BackendSourceError, match=r"manifest\.json"):
        project.unpatch()
    outcome = project.unpatch(force=True)
    assert outcome.backup is not None


class TestGitSource:
    """A real repository with one commit."""

    @pytest.fixture
    def repository(self, project: Project) -> tuple[str, str]:
        def git(*arguments: str) -> str:
            identity = ("-c", "user.name=x", "-c", "user.email=x@x")
            command = ["git", *identity, *arguments]
            return subprocess.run(
                command, cwd=project.source, check=True, capture_output=True, text=True
            ).stdout.strip()

        git("init", "-q")
        git("add", ".")
        git("commit", "-qm", "one")
        commit = git("rev-parse", "HEAD")
        write_file(project.source / "README.md", "later\n")
        git("commit", "-qam", "two")
        return f"file://{project.source}", commit

    def test_git_source_is_the_pinned_commit(
        self, project: Project, repository: tuple[str, str]
    ) -> None:
        url, commit = repository
        subprocess.run(
            ["git", "config", "uploadpack.allowAnySHA1InWant", "true"],
            cwd=project.source,
            check=True,
        )
        outcome = unpatch(
            project.layout, SourceOptions(url=url, commit=commit), report_step=ignore_line
        )
        assert (project.tree / "README.md").read_text() == "# tiny\n"
        assert commit[:12] in outcome.manifest.source
        shutil.rmtree(project.source)  # from now on the cached copy is used
        (project.tree / "README.md").unlink()
        assert unpatch(
            project.layout, SourceOptions(), force=True, report_step=ignore_line
        ).was_built

    @pytest.mark.parametrize("damage", ["changed", "cut", "empty"])
    def test_cached_copy_is_verified_and_fetched_again(
        self, project: Project, repository: tuple[str, str], damage: str
    ) -> None:
        url, commit = repository
        run_git = ["git", "-C", str(project.source), "config", "uploadpack.allowAnySHA1InWant"]
        subprocess.run([*run_git, "true"], check=True)
        options = SourceOptions(url=url, commit=commit)
        unpatch(project.layout, options, report_step=ignore_line)
        scan_before = scan_tree(project.tree)
        object_files = cache_directory().glob("git-*/objects/??/*")
        path = max(object_files, key=lambda path: path.stat().st_size)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        damaged = {"changed": bytes(content), "cut": bytes(content[:60]), "empty": b""}[damage]
        path.chmod(0o644)
        path.write_bytes(damaged)
        (project.tree / "README.md").unlink()
        unpatch(project.layout, options, force=True, report_step=ignore_line)
        assert scan_tree(project.tree) == scan_before
        # The same without the repository: the damage is not used.
        path.chmod(0o644)
        path.write_bytes(damaged)
        (project.tree / "README.md").unlink()
        shutil.rmtree(project.source)
        with pytest.raises(BackendSourceError, match="could not be fetched"):
            unpatch(project.layout, options, force=True, report_step=ignore_line)

    def test_missing_commit_is_reported(
        self, project: Project, repository: tuple[str, str]
    ) -> None:
        with pytest.raises(BackendSourceError, match="does not have commit 0123"):
            unpatch(
                project.layout,
                SourceOptions(url=repository[0], commit="0123" * 10),
                report_step=ignore_line,
            )

    def test_missing_repository_is_reported(self, project: Project, tmp_path: Path) -> None:
        url = f"file://{tmp_path}/nowhere"
        with pytest.raises(BackendSourceError, match="could not be fetched"):
            unpatch(
                project.layout, SourceOptions(url=url, commit="0123" * 10), report_step=ignore_line
            )

    def test_branch_is_not_a_pin(self, project: Project) -> None:
        with pytest.raises(BackendSourceError, match="'main' is not a full commit id"):
            unpatch(
                project.layout,
                SourceOptions(url="file:///x", commit="main"),
                report_step=ignore_line,
            )


class TestOtherSources:
    """Tests of sources that are missing or differ from their pin."""

    def test_missing_path_is_reported(self, project: Project) -> None:
        with pytest.raises(BackendSourceError, match="no such file or directory"):
            unpatch(
                project.layout, SourceOptions(path=Path("/no/such/tree")), report_step=ignore_line
            )

    def test_path_kind_needs_a_path(self, project: Project) -> None:
        with pytest.raises(BackendSourceError, match="needs --path"):
            unpatch(project.layout, SourceOptions(kind="path"), report_step=ignore_line)

    def test_missing_distribution_is_reported(self, project: Project) -> None:
        with pytest.raises(BackendSourceError, match=r"tiny-backend 1\.2\.3 is not installed"):
            unpatch(project.layout, SourceOptions(kind="installed"), report_step=ignore_line)

    def test_git_kind_needs_url_and_commit(self, project: Project) -> None:
        with pytest.raises(BackendSourceError, match="needs --url and --commit"):
            unpatch(project.layout, SourceOptions(kind="git"), report_step=ignore_line)


def test_record_is_plain_json(project: Project) -> None:
    project.unpatch()
    record = json.loads(project.layout.manifest.read_text())
    assert record["choice"] == {"path": str(project.source)}
    assert isinstance(BackendLayout(project.layout.root, "tiny"), BackendLayout)


def test_many_files_are_rewritten_in_parallel(project: Project) -> None:
    for i in range(adapt._MIN_FILES_FOR_PROCESSES + 3):
        write_file(project.source / f"tiny/m{i}.py", "import torch\n\ntorch.cuda.synchronize()\n")
    outcome = project.unpatch()
    assert outcome.manifest.rewritten_files == adapt._MIN_FILES_FOR_PROCESSES + 4
