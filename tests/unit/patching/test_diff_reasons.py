"""Tests of the explanations of diffs that do not apply."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

from flagscale.patching.diffs import explain_failure, parse_diff

DIFF = dedent("""\
    # A header with --- in it.
    diff --git a/sub/x.py b/sub/x.py
    --- a/sub/x.py
    +++ b/sub/x.py
    @@ -1,3 +1,3 @@
     one
    -two
    +TWO
     three
    @@ -10,2 +10,3 @@ def f():
     ten
    +ten and a half
     eleven
    diff --git a/new.py b/new.py
    new file mode 100644
    --- /dev/null
    +++ b/new.py
    @@ -0,0 +1 @@
    +--- looks like a header
""")


def test_parse_reads_files_and_hunks() -> None:
    changed_file, new_file = parse_diff(DIFF)
    assert (changed_file.old_path, changed_file.new_path) == ("sub/x.py", "sub/x.py")
    assert [h.start for h in changed_file.hunks] == [1, 10]
    assert changed_file.hunks[0].old_lines == ["one", "two", "three"]
    assert changed_file.hunks[0].new_lines == ["one", "TWO", "three"]
    assert (new_file.old_path, new_file.new_path) == (None, "new.py")
    assert new_file.hunks[0].new_lines == ["--- looks like a header"]


def test_parse_reads_quoted_names() -> None:
    text = '--- "a/\\303\\274 x"\t\n+++ "b/\\303\\274 x"\t\n@@ -1 +1 @@\n-a\n+b\n'
    assert parse_diff(text)[0].old_path == "ü x"


def test_message_names_hunk_line_expected_and_actual_text(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    body = [f"line {i}" for i in range(30)]
    body[20:22] = ["ten", "twelve"]
    (tmp_path / "sub/x.py").write_text("one\ntwo\nthree\n" + "\n".join(body))
    assert explain_failure(DIFF, tmp_path) == [
        "sub/x.py: hunk 2 of 2 (@@ -10,2 +10,3 @@ def f():) does not fit:\n"
        "    line 25: expected 'eleven'\n    found    'twelve'"
    ]


def test_message_for_an_applied_patch(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/x.py").write_text("one\nTWO\nthree\nten\neleven\n")
    (reason,) = explain_failure(DIFF, tmp_path)
    assert "hunk 1 of 2" in reason
    assert "already has the hunk's result" in reason


def test_message_for_missing_or_existing_files(tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text("")
    assert explain_failure(DIFF, tmp_path) == [
        "sub/x.py: the patch changes it, but there is no such file",
        "new.py: the patch creates it, but it is already there",
    ]


def test_message_for_an_early_end_of_file(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/x.py").write_text("one")
    reasons = explain_failure(DIFF, tmp_path)
    assert "found    the end of the file" in reasons[0]
