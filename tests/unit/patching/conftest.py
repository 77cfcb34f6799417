"""Fixture with a backend that is small enough to be adapted in milliseconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from flagscale.patching.sources import SourceOptions
from flagscale.patching.spec import BackendLayout
from flagscale.patching.unpatch import UnpatchResult, unpatch

BACKEND = """\
name: tiny
version: 1.2.3
version_file: tiny/version.py
default_source: registry
sources:
  registry: {package: tiny-backend, sha256: "%s"}
  installed: {package: tiny-backend}
""" % ("0" * 64)

CODEMODS = """\
rules:
  - codemods: [cuda-calls, device-literals]
    include: [tiny/*.py]
    exclude: [tiny/kernels/*]
"""

SOURCE = {
    "tiny/__init__.py": "",
    "tiny/version.py": '__version__ = "1.2.3"\n',
    "tiny/work.py": (
        "import torch\n\n\ndef work():\n    return torch.cuda.current_device()\n\n\n"
        "def rest():\n    return 1\n"
    ),
    "tiny/kernels/fast.py": "import torch\n\nn = torch.cuda.current_device\n",
    "tiny/data/notes ü $x.txt": "one\ntwo\nthree\n",
    "README.md": "# tiny\n",
}


class Project:
    """A project root with the definition of ``tiny`` and a checkout of its source."""

    def __init__(self, root: Path) -> None:
        self.layout = BackendLayout(root / "project", "tiny")
        self.source = root / "checkout"
        self.layout.definition.mkdir(parents=True)
        (self.layout.definition / "backend.yaml").write_text(BACKEND)
        (self.layout.definition / "codemods.yaml").write_text(CODEMODS)
        for name, content in SOURCE.items():
            write_file(self.source / name, content)

    @property
    def tree(self) -> Path:
        return self.layout.tree

    def unpatch(self, *, force: bool = False) -> UnpatchResult:
        options = SourceOptions(path=self.source)
        return unpatch(self.layout, options, force=force, report_step=lambda line: None)


def write_file(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setenv("FLAGSCALE_CACHE", str(tmp_path / "cache"))
    return Project(tmp_path)
