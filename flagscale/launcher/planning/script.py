"""Rendering of a host's script: one readable block per concern, quoted by construction.

Command lines become bash arrays through :func:`shlex.quote`. The user's commands are copied
verbatim into here-documents whose delimiter does not occur in them, so no value can escape its
quoting. The script passes ``bash -n`` and shellcheck, and can be run by hand. Pure functions.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from flagscale import __version__
from flagscale.accelerators.probes import default_variables_script
from flagscale.config.interpolation import host_reference, host_references, split_references
from flagscale.launcher.layout import AGENT_FILE, EXIT_FILE, SCRIPT_FILE
from flagscale.launcher.liveness.options import AgentOptions
from flagscale.launcher.planning.environment import (
    JOB_VARIABLES,
    NODE_VARIABLE,
    PYTHONPATH_VARIABLE,
    RENDEZVOUS_VARIABLE,
    EnvironmentVariable,
)
from flagscale.launcher.planning.model import HostPlan, LaunchPlan
from flagscale.launcher.planning.per_host import read_script_part
from flagscale.launcher.planning.supervision import AGENT_SECRETS
from flagscale.module_command import python_arguments

# The kernel limits one argument to 128 KiB; the names of thousands of hosts can exceed that.
_LINES_PER_ARGUMENT = 256
_TORCHRUN = "torch.distributed.run"


def render(plan: LaunchPlan, host: HostPlan) -> str:
    """Return the script of one host."""
    array = _starter_array_name(host.starter)
    start = f'"${{agent[@]}}" -- "${{{array}[@]}}" "${{program[@]}}"'
    if _agent_secrets(host.environment):
        start = f"(give_secrets && exec {start})"
    start += " &\n"
    saved_names = _saved_variable_names(host.environment)
    parts = (
        *_render_header(plan, host),
        *_save_host_variables(saved_names),
        *_render_paths(plan.run_id, host),
        *_render_environment(host.environment, host.python_path, saved_names),
        *_render_command_lines(plan, host),
    )
    run_job = f"{read_script_part('before_job.sh')}\n{start}{read_script_part('after_job.sh')}\n"
    return "\n".join((*parts, run_job))


def _render_header(plan: LaunchPlan, host: HostPlan) -> Iterator[str]:
    last_rank = host.first_rank + host.nproc - 1
    rank_text = f"ranks {host.first_rank} to {last_rank} of {plan.world_size}"
    if host.is_spare:
        rank_text = "a spare, without ranks until it takes the place of a lost host"
    yield "#!/usr/bin/env bash"
    yield f"# {_join_lines(plan.name)}: host {host.node_rank} of {len(plan.hosts)}, {rank_text}."
    yield f"# Written by flagscale {__version__} for run {plan.run_id}; can be run by hand."
    yield "# shellcheck disable=SC2016,SC2317,SC2329 # values are literal; traps call functions"
    yield read_script_part("own_shell_options.sh")
    yield "set -uo pipefail"
    yield ""
    if host.late:
        yield "# Set by the job that starts this script: host name and rendezvous of the ranks."
        yield from (f': "${{{name}:?is set by the job}}"' for name in JOB_VARIABLES)
        yield ""


def _render_paths(run_id: str, host: HostPlan) -> Iterator[str]:
    yield "# Name of the run in messages, and its files on this host."
    name = host_reference(NODE_VARIABLE) if host.late else host.name
    yield f"run_label={_quote_references(f'run {run_id} on {name}')}"
    yield f"run_dir={_quote(str(host.run_dir))}"
    yield f"pid_file={_quote(str(host.pid_file))}"
    yield f'exit_file="$run_dir/{EXIT_FILE}"'
    yield f'agent_file="$run_dir/{AGENT_FILE}"'
    yield f'script_file="$run_dir/{SCRIPT_FILE}"'
    yield f"cd -- {_quote(str(host.workdir))} || exit 1"
    yield ""


def _quote(word: str) -> str:
    """Return one word for bash. Commas are quoted too: in an array they look like a mistake."""
    quoted = shlex.quote(word)
    return f"'{word}'" if quoted == word and "," in word else quoted


def _quote_references(word: str) -> str:
    """Return one word for bash that may contain references to variables set by the job."""
    return _expand_references("", word, {})


def _join_lines(text: str) -> str:
    """Return a value for a comment, without line ends, which would end the comment."""
    return " ".join(text.split())


_BLOCK_COMMENTS = {
    "run": "# Identity of the run: `stop` ends the processes with this environment, and no others.",
    "default": "# Defaults; overridden by `experiment.envs` and the environment of the launch.",
    "inherited": "# From the environment of the launch, in place of defaults.",
    "detected": "# Network interface that reaches the other hosts.",
}


def _save_host_variables(saved_names: Mapping[str, str]) -> Iterator[str]:
    """Yield lines that save the host's own variables before this script replaces them."""
    if saved_names:
        yield "# This host's own variables that `experiment.envs` refers to."
        yield from (f"{saved_name}=${{{name}-}}" for name, saved_name in saved_names.items())
        yield ""


def _saved_variable_names(environment: Sequence[EnvironmentVariable]) -> dict[str, str]:
    """Return the host's own variables that values refer to, with the names under which they are
    saved.

    A saved name differs from every variable that the script sets or refers to.
    """
    public_variables = [value for value in environment if not value.secret]
    names = [name for value in public_variables for name in host_references(value.value)]
    names = [name for name in names if name not in JOB_VARIABLES]
    prefix = "host_"
    while any(
        name.startswith(prefix) for name in (*names, *(value.name for value in public_variables))
    ):
        prefix += "_"
    return {name: f"{prefix}{name}" for name in names}


def _render_environment(
    environment: Sequence[EnvironmentVariable],
    python_path: Sequence[str],
    saved_names: Mapping[str, str],
) -> Iterator[str]:
    user_path = ""
    origin = ""
    for value in environment:
        if value.secret:
            continue
        if value.name == PYTHONPATH_VARIABLE:
            user_path = value.value
            continue
        if value.origin != origin:
            origin = value.origin
            yield _BLOCK_COMMENTS.get(origin, f"# experiment.{_join_lines(origin)}")
        yield f"export {value.name}={_expand_references(value.name, value.value, saved_names)}"
    secrets = [v.name for v in environment if v.secret and v.name not in AGENT_SECRETS]
    if secrets:
        yield "# Secrets are not written to files: they come from the environment."
        required = ':?is a secret: export it, then run this script}"'
        yield from (f': "${{{name}{required}' for name in secrets)
    yield ""
    yield "# The program's own packages, the adapted training backend, this project."
    path = ":".join(filter(None, (*python_path, user_path)))
    suffix = "" if PYTHONPATH_VARIABLE in host_references(path) else '"${PYTHONPATH:+:$PYTHONPATH}"'
    yield f"export PYTHONPATH={_expand_references(PYTHONPATH_VARIABLE, path, saved_names)}{suffix}"
    yield ""


def _expand_references(variable: str, value: str, saved_names: Mapping[str, str]) -> str:
    """Return a value as one word for bash, with references to the host's own variables."""
    quoted = []
    for part in split_references(variable, value):
        if isinstance(part, str):
            quoted.append(_quote(part))
            continue
        prefix, name, suffix = part
        saved_name = saved_names.get(name, name)
        if prefix or suffix:
            quoted.append(f'"${{{saved_name}:+{prefix}${saved_name}{suffix}}}"')
        else:
            quoted.append(f'"${saved_name}"')
    return "".join(quoted) or "''"


def _starter_array_name(starter: Sequence[str]) -> str:
    """Return the name of the bash array that holds the command that starts the ranks."""
    return "torchrun" if _TORCHRUN in starter else "starter"


def _agent_secrets(environment: Sequence[EnvironmentVariable]) -> list[str]:
    return [value.name for value in environment if value.name in AGENT_SECRETS]


def _hide_secrets(names: Sequence[str]) -> Iterator[str]:
    """Yield lines that move variables out of the environment, and a function that restores them.

    Only the agent gets these variables. If they are unset because the script is run by hand, the
    agent reads them from the file in which it saved them.
    """
    yield "# Passed to the agent alone: hidden from the commands below and from the ranks."
    for number, name in enumerate(names):
        yield f"hidden_{number}=${{{name}-}}"
    yield f"unset {' '.join(names)}"
    yield "give_secrets() {"
    for number, name in enumerate(names):
        yield f"    export {name}=$hidden_{number}"
    yield "}"


def _render_command_lines(plan: LaunchPlan, host: HostPlan) -> Iterator[str]:
    program = "training program" if _TORCHRUN in host.starter else "command"
    yield f"# Supervisor, launcher of the ranks, {program}."
    directory = Path(host.python_path[-1])
    yield _bash_array(
        "agent", _agent_command(host.python, directory, host.agent, is_deferred=host.late)
    )
    yield _bash_array(_starter_array_name(host.starter), host.starter)
    yield _bash_array("program", host.program)
    if names := _agent_secrets(host.environment):
        yield from _hide_secrets(names)
    yield ""
    yield "# experiment.cmds, verbatim."
    commands = [host.before_start]
    if host.unprobed:
        commands += [f"processes={host.agent.nproc}", read_script_part("unprobed_machine.sh")]
        commands += default_variables_script()
        if len(plan.hosts) > 1:
            commands.append(f"master={_quote_references(plan.master_addr)}")
            commands.append(read_script_part("unprobed_network.sh"))
    yield from _bash_text("before_start", "\n".join(filter(None, commands)))
    yield from _bash_text("after_stop", host.after_stop)
    yield ""


def _agent_command(
    python: str, directory: Path, agent_options: AgentOptions, *, is_deferred: bool
) -> tuple[str, ...]:
    """Return the command line of the host's agent.

    Args:
        python: Python interpreter of the host.
        directory: Directory of this project on the host.
        agent_options: Options of the agent.
        is_deferred: True if the job that starts the script sets the agents' rendezvous.
    """
    # JSON strings contain no line ends, so the lines can be indented like those of the array.
    lines = agent_options.to_json().split("\n")
    options = (
        "\n    ".join(lines[start : start + _LINES_PER_ARGUMENT])
        for start in range(0, len(lines), _LINES_PER_ARGUMENT)
    )
    program = (python, *python_arguments("flagscale.launcher.agent", directory))
    rendezvous = ("--meeting", host_reference(RENDEZVOUS_VARIABLE)) if is_deferred else ()
    return (*program, "--options", *options, *rendezvous)


def _bash_array(name: str, argv: Sequence[str]) -> str:
    """Return a bash array, with one option and its values per line."""
    lines: list[list[str]] = []
    for word in argv:
        if not lines or word.startswith("--"):
            lines.append([])
        lines[-1].append(_quote_references(word))
    body = "\n".join(f"    {' '.join(line)}" for line in lines)
    return f"{name}=(\n{body}\n)"


def _bash_text(name: str, text: str) -> Iterator[str]:
    """Yield lines that assign a text to a variable, readable and unchanged."""
    if not text.strip():
        yield f"{name}="
        return
    delimiter = f"END_{name.upper()}"
    while delimiter in text:
        delimiter += "_"
    yield f"IFS= read -r -d '' {name} <<'{delimiter}'"
    yield text.rstrip("\n")
    yield delimiter
