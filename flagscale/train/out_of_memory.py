"""Explanation of a device's lack of memory: which arguments would save how much."""

from __future__ import annotations

import argparse
import re

from flagscale.estimate.changes import list_savings
from flagscale.estimate.plan import find_padded_vocabulary

_REQUESTED = re.compile(r"Tried to allocate ([\d.]+ \w+)")
_FREE = re.compile(r"total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free")


def explain_out_of_memory(
    message: str,
    args: argparse.Namespace,
    *,
    device: str,
    rank: int,
    step: int | None,
    stage_index: int | None,
) -> str:
    """Return a sentence about an allocation that failed, with the changes that save the most.

    Args:
        message: torch's message.
        args: resolved arguments of the rank.
        device: name of the kind of device.
        rank: the rank that failed.
        step: the step that it was in; None before the first one.
        stage_index: its pipeline stage; None if the layout is not known yet.
    """
    moment = "before the first step" if step is None else f"in step {step}"
    figures = []
    if match := _REQUESTED.search(message):
        figures.append(f"tried to allocate {match[1]}")
    if match := _FREE.search(message):
        figures.append(f"{match[2]} of {match[1]} free")
    detail = f": {', '.join(figures)}" if figures else ""
    advice = "; ".join(_describe_savings(args, stage_index))
    return f"{device} out of memory on rank {rank} {moment}{detail}; {advice}"


def _describe_savings(args: argparse.Namespace, stage_index: int | None) -> list[str]:
    no_advice = ["`flagscale estimate` shows what takes the memory"]
    try:
        savings = list_savings(args, find_padded_vocabulary(args), stage_index)
    except Exception:  # noqa: BLE001 - the failure itself must be reported in any case
        return no_advice
    return [str(saving) for saving in savings] or no_advice
