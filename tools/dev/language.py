"""Measure how the project's text reads, and fail if it gets worse.

usage: tools/dev/language.py [--worst N]

Measured are the docstrings, comments and names of ``flagscale``, the comments of fsccl's C++
sources, and the sentences of the documentation. :data:`LIMITS` has the limits. They are
thermometers: the goal is a text that a reader understands at once. CONTRIBUTING.md has the rules.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
LIMITS = {
    "docstrings that open with a question word or preposition, %": 2.0,
    "clauses such as 'what it is', per 10,000 words": 8.0,
    "tell, say and hear, per 10,000 words": 8.0,
    "variables with vague names, per 10,000 assignments": 40.0,
    "functions named by one word, %": 40.0,
    "the same clauses and verbs in C++ comments, per 10,000 words": 8.0,
    "sentences over 40 words in the documentation, %": 5.0,
}
"""The highest value allowed of each figure."""

_OPENING = re.compile(
    r"(what|whether|which|who|whoever|whose|of|where|how|by|for|in|to|from|with|without|as|none"
    r"|nothing)\b",
    re.IGNORECASE,
)
_CLAUSE = re.compile(
    r"\bwhat (a|the|it|they|is|are|was|has|have|ranks?|hosts?|others?|this|that|each|of|to|no"
    r"|nobody|can|must|goes|comes|came|stands|lies|holds|follows|does|do|one|only|else)\b",
    re.IGNORECASE,
)
_SAYING = re.compile(r"\b(tells?|told|telling|says?|said|saying|hears?|heard)\b", re.IGNORECASE)
_VAGUE = frozenset(
    {
        "found",
        "told",
        "made",
        "said",
        "own",
        "one",
        "given",
        "wanted",
        "kept",
        "asked",
        "taken",
        "seen",
        "brought",
        "known",
        "gone",
        "left",
        "others",
        "other",
        "rest",
        "done",
        "shown",
        "meant",
    }
)
_LONG_SENTENCE = 40


@dataclass
class Tally:
    """Counts over all files that were read; ``places`` lists where each kind was found."""

    words: int = 0
    docstrings: int = 0
    openings: int = 0
    clauses: int = 0
    sayings: int = 0
    assignments: int = 0
    vague: int = 0
    functions: int = 0
    one_word: int = 0
    cpp_words: int = 0
    cpp_phrases: int = 0
    sentences: int = 0
    long_sentences: int = 0
    places: Counter[str] = field(default_factory=Counter)

    def read_python(self, path: Path) -> None:
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                self._read_docstring(node, path)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if not node.name.startswith("__"):
                    self.functions += 1
                    self.one_word += "_" not in node.name.strip("_")
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.assignments += 1
                if node.id.strip("_") in _VAGUE:
                    self.vague += 1
                    self.places[f"{path}:{node.lineno}: variable {node.id}"] += 1
        self._read_text(" ".join(_python_comments(source)), path)

    def _read_docstring(
        self, node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, path: Path
    ) -> None:
        text = ast.get_docstring(node)
        if not text:
            return
        self.docstrings += 1
        if _OPENING.match(text):
            self.openings += 1
            line = getattr(node, "lineno", 1)
            self.places[f"{path}:{line}: docstring opens with {text.split()[0]!r}"] += 1
        self._read_text(text, path)

    def _read_text(self, text: str, path: Path) -> None:
        self.words += len(text.split())
        clauses, sayings = _CLAUSE.findall(text), _SAYING.findall(text)
        self.clauses += len(clauses)
        self.sayings += len(sayings)
        if clauses or sayings:
            self.places[f"{path}: clauses and verbs of saying"] += len(clauses) + len(sayings)

    def read_cpp(self, path: Path) -> None:
        text = " ".join(re.findall(r"//(.*)", path.read_text(encoding="utf-8")))
        phrases = len(_CLAUSE.findall(text)) + len(_SAYING.findall(text))
        self.cpp_words += len(text.split())
        self.cpp_phrases += phrases
        if phrases:
            self.places[f"{path}: clauses and verbs of saying"] += phrases

    def read_markdown(self, path: Path) -> None:
        for sentence in sentences(path.read_text(encoding="utf-8")):
            self.sentences += 1
            if len(sentence.split()) > _LONG_SENTENCE:
                self.long_sentences += 1
                self.places[f"{path}: long sentence: {sentence[:60]} …"] += 1

    def figures(self) -> dict[str, float]:
        """Return the figures by the names of :data:`LIMITS`, in their order."""
        return dict(
            zip(
                LIMITS,
                (
                    _share(self.openings, self.docstrings, 100),
                    _share(self.clauses, self.words, 10_000),
                    _share(self.sayings, self.words, 10_000),
                    _share(self.vague, self.assignments, 10_000),
                    _share(self.one_word, self.functions, 100),
                    _share(self.cpp_phrases, self.cpp_words, 10_000),
                    _share(self.long_sentences, self.sentences, 100),
                ),
                strict=True,
            )
        )


def sentences(markdown: str) -> Iterator[str]:
    """Yield the sentences of a page: without code blocks, tables, headings and link targets.

    An item of a list counts as a paragraph of its own.
    """
    text = re.sub(r"^ *```.*?^ *```", "", markdown, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^(\||#|!\[|<!--|\s*\|).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    text = re.sub(r"^\s*([-*]|\d+\.) ", "\n\n", text, flags=re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n", text):
        for sentence in re.split(r"(?<=[.!?])\s+", " ".join(paragraph.split())):
            if sentence:
                yield sentence


def measure(project: Path = PROJECT) -> Tally:
    """Read the project's package, C++ sources and documentation."""
    tally = Tally()
    for path in sorted((project / "flagscale").rglob("*")):
        if path.suffix == ".py":
            tally.read_python(path)
        elif path.suffix in (".h", ".cpp", ".cu"):
            tally.read_cpp(path)
    for path in documentation(project):
        tally.read_markdown(path)
    return tally


def documentation(project: Path = PROJECT) -> Iterable[Path]:
    """Return the project's Markdown pages."""
    return [*sorted(project.glob("*.md")), *sorted((project / "docs").rglob("*.md"))]


def _share(count: int, total: int, scale: int) -> float:
    return scale * count / max(1, total)


def _python_comments(source: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure how the project's text reads.")
    parser.add_argument("--worst", type=int, default=0, metavar="N", help="also list N places")
    options = parser.parse_args()
    tally = measure()
    exceeded = 0
    for name, value in tally.figures().items():
        over = value > LIMITS[name]
        exceeded += over
        print(f"{value:7.1f}  (at most {LIMITS[name]:g})  {name}{'  <- too many' if over else ''}")
    for place, _ in tally.places.most_common(options.worst):
        print(f"  {place.removeprefix(f'{PROJECT}/')}")
    return int(exceeded > 0)


if __name__ == "__main__":
    sys.exit(main())
