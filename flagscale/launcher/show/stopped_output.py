"""The last lines of a run that the user has stopped, without the report of its ranks' exit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_TRACEBACK = "Traceback (most recent call last):"
_ELASTIC_LOG = re.compile(r"[WEI]\d{4} .*torch/distributed/(elastic|launcher|run)")
_CONSEQUENCES = (
    "torch.distributed.elastic.multiprocessing.api.SignalException:",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
)
"""Exceptions of a torchrun that was told to end."""
_RULE = re.compile(r"={10,}")
_RULES_OF_TABLE = 2
_COMMAND_REPORT = re.compile(r"flagscale: \d+ rank\(s\) of this host failed")
_REPORT_LINE = re.compile(r"Failures:|\[\d+\]:|  (time|host|rank|exitcode) +: .*|")
"""Lines of the report of a command's ranks (``rank_processes.format_failures``)."""


def without_torchrun_report(lines: Iterable[str]) -> Iterator[str]:
    """Yield lines of a host's script and of its ranks, without messages about the ranks' exit.

    Left out are torchrun's log lines, its own traceback with the table of failures, and the table
    of a command's ranks, which look like those of a crash. Lines of ranks, and tracebacks of
    anything else, are kept.

    Args:
        lines: Lines of one host, ``host: text`` or ``host:rank: text``.
    """
    pending: list[str] = []
    rules = 0
    in_report = False
    for line in lines:
        text = _text_of_script(line)
        in_report = text is not None and (
            bool(_COMMAND_REPORT.fullmatch(text))
            or (in_report and bool(_REPORT_LINE.fullmatch(text)))
        )
        if text is None:
            yield line
        elif in_report:
            continue
        elif rules:
            rules -= _RULE.fullmatch(text) is not None
        elif pending:
            pending.append(line)
            if text.startswith(_CONSEQUENCES):
                rules = _RULES_OF_TABLE if "ChildFailedError" in text else 0
                pending = []
            elif text and not text.startswith(" "):
                yield from pending
                pending = []
        elif text == _TRACEBACK:
            pending = [line]
        elif not _ELASTIC_LOG.match(text):
            yield line
    yield from pending


def _text_of_script(line: str) -> str | None:
    """Return the text of a line of the script, the agent or torchrun; None for a rank's line."""
    label, colon, text = line.partition(": ")
    if not colon or ":" in label:
        return None
    return text.rstrip()
