"""Suggestions for commands and options of other programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

OTHER_VERBS = {
    **dict.fromkeys(("status", "state", "info", "describe", "inspect", "poll"), "query"),
    **dict.fromkeys(("watch", "monitor", "top", "attach", "follow"), "query CONFIG --follow"),
    **dict.fromkeys(("launch", "start", "submit", "up", "exec"), "run"),
    **dict.fromkeys(("sbatch", "srun", "torchrun", "finetune", "sft", "pretrain"), "run"),
    **dict.fromkeys(("resume", "continue", "restart", "requeue"), "run"),
    **dict.fromkeys(("repeat", "retry", "reproduce", "again", "clone"), "rerun"),
    **dict.fromkeys(("list", "ls", "ps", "jobs", "squeue", "history"), "runs"),
    **dict.fromkeys(("kill", "cancel", "abort", "down", "scancel", "terminate", "end"), "stop"),
    **dict.fromkeys(("tail",), "logs CONFIG --follow"),
    **dict.fromkeys(("log", "output", "cat"), "logs"),
    **dict.fromkeys(("validate", "verify", "lint", "doctor", "preflight"), "check"),
    **dict.fromkeys(("plan", "dry-run", "preview", "render"), "dryrun"),
    **dict.fromkeys(("debug", "foreground"), "test"),
    **dict.fromkeys(("memory", "profile", "cost"), "estimate"),
    **dict.fromkeys(("plot", "dashboard", "tensorboard", "compare"), "report"),
    **dict.fromkeys(("export", "import"), "convert"),
    **dict.fromkeys(("eval", "lm_eval", "lm-eval"), "evaluate"),
    **dict.fromkeys(("doc", "docs", "man", "search", "option", "options", "keys"), "explain"),
    **dict.fromkeys(("benchmark", "nccl-tests"), "bench"),
    **dict.fromkeys(("sweep", "multirun"), "run CONFIG -m key=a,b"),
    **dict.fromkeys(("autocomplete", "complete", "completions"), "completion"),
    **dict.fromkeys(("new", "create", "template", "scaffold"), "init"),
    **dict.fromkeys(("help",), "--help"),
}
"""Commands of other programs, with the command line of this program that does the same."""
_REMARKS = {
    **dict.fromkeys(
        ("resume", "continue", "restart", "requeue"),
        "; it resumes from the newest checkpoint of the experiment",
    ),
}


_REFUSED_VERBS = {
    **dict.fromkeys(
        ("serve", "inference", "generate", "chat"),
        "this project trains models; `flagscale convert` writes one for vLLM, SGLang or "
        "transformers",
    ),
    "rl": "reinforcement learning is not supported; `train.data.sft: true` fine-tunes on "
    "conversations, `train.data.dpo: true` on preferences",
    "compress": "compressing a model is not supported; `flagscale convert` writes it in Hugging "
    "Face's format, which tools for quantization read",
    **dict.fromkeys(
        ("preprocess", "tokenize"), "`python tools/data/preprocess.py` writes data for training"
    ),
    **dict.fromkeys(
        ("install", "pull", "setup"), "`make setup` in the project installs what training needs"
    ),
}
"""Commands of other programs that this program does not have, with the reason or a substitute."""


def suggest_command(word: str, commands: Iterable[str]) -> str:
    """Return the message about a word that is not a command, with the command that is meant."""
    if refusal := _REFUSED_VERBS.get(word.lower()):
        return f"no command {word!r}: {refusal}"
    equivalent = OTHER_VERBS.get(word.lower())
    if equivalent is not None:
        return (
            f"no command {word!r}; did you mean `flagscale {equivalent}`?{_REMARKS.get(word, '')}"
        )
    if word.endswith((".yaml", ".yml")):
        return f"{word} is not a command; did you mean `flagscale run {word}`?"
    similar = get_close_matches(word, [*commands, *OTHER_VERBS], n=1, cutoff=0.75)
    command = OTHER_VERBS.get(similar[0], similar[0]) if similar else ""
    suggestion = f"; did you mean `flagscale {command}`?" if command else ""
    return f"no command {word!r}{suggestion}"


_DRY_RUN = dict.fromkeys(
    ("--dryrun", "--dry-run", "--dry"), "`flagscale dryrun …` prints the plan and starts nothing"
)
_OTHER_OPTIONS = {
    "run": {
        **_DRY_RUN,
        "--follow": "`flagscale query ID --follow` watches a run, `flagscale test` shows its lines",
        "-d": "leave it out: `flagscale run` starts in the background",
        "--resume": "leave it out: a run resumes from the newest checkpoint of its experiment",
    },
    "test": {
        **_DRY_RUN,
        "--resume": "leave it out: a run resumes from the newest checkpoint of its experiment",
    },
    "logs": {"--tail": "write --lines N"},
}
"""Options of other programs, by the command, with what to type instead."""
_OPTIONS_OF_PROGRAMS = {"--nnodes": "give the hosts of a program by name: --hosts a,b"}
"""The same for a command with a program in place of a YAML, where keys are no answer."""


def suggest_option(
    option: str, command: str, options: Iterable[str], *, has_program: bool = False
) -> str | None:
    """Return a hint for an unknown option that this program has under another name; or None.

    Args:
        option: The option: ``--folow``, or ``--tail=3``.
        command: The subcommand.
        options: The options that it accepts.
        has_program: Whether a program is given in place of a YAML.
    """
    flag = option.partition("=")[0]
    if has_program and (remark := _OPTIONS_OF_PROGRAMS.get(flag)):
        return remark
    if remark := _OTHER_OPTIONS.get(command, {}).get(flag):
        return remark
    similar = get_close_matches(flag, options, n=1, cutoff=0.8) if len(flag) > 4 else []
    return f"did you mean {similar[0]}?" if similar else None


def suggest_override(option: str, words: Sequence[str]) -> str | None:
    """Return the override that an unknown option stands for, such as ``train.model.lr=0.1`` for
    ``--lr 0.1``, as a hint; None if the name is unknown.

    Args:
        option: The option: ``--lr``, or ``--lr=0.1``.
        words: Words of the command line that follow it.
    """
    from flagscale.config.arguments.compat.trainer_names import replacement_of
    from flagscale.config.arguments.spec.argument import SettingContext
    from flagscale.config.overrides import complete_key, usual_key

    flag, _, value = option.partition("=")
    value = value or next((word for word in words[:1] if not word.startswith("-")), "")
    name = flag.strip("-").replace("-", "_")
    if key := complete_key(name) or usual_key(name):
        return f"settings are overrides: {key}={value or 'VALUE'}"
    return replacement_of(name, value or None, SettingContext(is_override=True)) or None
