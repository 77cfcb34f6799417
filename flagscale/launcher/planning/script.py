"""A host's script: one readable block a concern, quoted by construction. Pure.

Argv becomes bash arrays through :func:`shlex.quote`; the user's own commands stand verbatim in
here-documents whose delimiter does not occur in them, so no value can break out of its place.
The script passes ``bash -n`` and shellcheck and runs by hand.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from flagscale import __version__
from flagscale.accelerators.probes import defaults_of_unprobed
from flagscale.config.interpolation import parts, reference, references
from flagscale.launcher.layout import AGENT_FILE, EXIT_FILE, SCRIPT_FILE
from flagscale.launcher.planning.environment import JOBS, MEETING, NODE, PYTHON_PATH
from flagscale.launcher.planning.model import HostPlan, LaunchPlan
from flagscale.launcher.planning.per_host import bash
from flagscale.launcher.planning.supervision import AGENT_SECRETS
from flagscale.modules import started

# The kernel takes words of up to 128 KiB: thousands of names without an order are more than that.
_PIECE_LINES = 256
_TORCHRUN = "torch.distributed.run"


def render(plan: LaunchPlan, host: HostPlan) -> str:
    """The script of one host."""
    start = f'"${{agent[@]}}" -- "${{{_starter(host)}[@]}}" "${{program[@]}}"'
    start = f"(give_secrets && exec {start}) &\n" if _agent_secrets(host) else f"{start} &\n"
    parts = (*_head(plan, host), *_environment(host), *_argvs(plan, host))
    return "\n".join((*parts, f"{bash('before_job.sh')}\n{start}{bash('after_job.sh')}\n"))


def _head(plan: LaunchPlan, host: HostPlan) -> Iterator[str]:
    ranks = f"ranks {host.ranks.start} to {host.ranks.stop - 1} of {plan.world_size}"
    yield "#!/usr/bin/env bash"
    yield f"# {_one_line(plan.name)}: host {host.node_rank} of {len(plan.hosts)}, {ranks}."
    yield f"# Written by flagscale {__version__} for run {plan.run_id}; also runs by hand."
    yield "# shellcheck disable=SC2016,SC2317,SC2329 # values are literal; traps call functions"
    yield "set -uo pipefail"
    yield ""
    if host.late:
        yield "# The job that starts this script says who it is, and where the ranks meet."
        yield from (f': "${{{name}:?is given by the job}}"' for name in JOBS)
        yield ""
    yield from _own_values(host)
    yield "# The run's name, its directory on this host, and what prints them."
    name = reference(NODE) if host.late else host.name
    yield f"who={_word(f'run {plan.run_id} on {name}')}"
    yield f"run_dir={_quote(str(host.run_dir))}"
    yield f"pid_file={_quote(str(host.pid_file))}"
    yield f'exit_file="$run_dir/{EXIT_FILE}"'
    yield f'agent_file="$run_dir/{AGENT_FILE}"'
    yield f'script_file="$run_dir/{SCRIPT_FILE}"'
    yield f"cd -- {_quote(str(host.workdir))} || exit 1"
    yield ""


def _quote(word: str) -> str:
    """One word for bash. Commas are quoted too: in an array they look like a mistake."""
    quoted = shlex.quote(word)
    return f"'{word}'" if quoted == word and "," in word else quoted


def _word(word: str) -> str:
    """The same of a word that may refer to what the job says."""
    return _with_references("", word, {})


def _one_line(text: str) -> str:
    """A value that may stand in a comment: line ends would end the comment."""
    return " ".join(text.split())


_BLOCKS = {
    "run": "# Every process of the run carries this; `stop` ends those and no others.",
    "default": "# Defaults; `experiment.envs` or the environment of the launch wins over them.",
    "inherited": "# From the environment of the launch, in place of defaults.",
    "detected": "# The interface that reaches the other hosts.",
}


def _own_values(host: HostPlan) -> Iterator[str]:
    """What values refer to, kept before anything here takes the place of the host's own."""
    referred = _referred(host)
    if referred:
        yield "# This host's own variables, to which `experiment.envs` refers."
        yield from (f"{kept}=${{{name}-}}" for name, kept in referred.items())
        yield ""


def _referred(host: HostPlan) -> dict[str, str]:
    """The host's own variables that values refer to, and the names that keep them: none that a
    value has for itself, or that another of those variables has."""
    plain = [value for value in host.environment if not value.secret]
    names = [name for value in plain for name in references(value.value)]
    names = [name for name in names if name not in JOBS]
    prefix = "host_"
    while any(name.startswith(prefix) for name in (*names, *(value.name for value in plain))):
        prefix += "_"
    return {name: f"{prefix}{name}" for name in names}


def _environment(host: HostPlan) -> Iterator[str]:
    kept = _referred(host)
    own_path = ""
    origin = ""
    for value in host.environment:
        if value.secret:
            continue
        if value.name == PYTHON_PATH:
            own_path = value.value
            continue
        if value.origin != origin:
            origin = value.origin
            yield _BLOCKS.get(origin, f"# experiment.{_one_line(origin)}")
        yield f"export {value.name}={_with_references(value.name, value.value, kept)}"
    secrets = [name for name in host.secrets if name not in AGENT_SECRETS]
    if secrets:
        yield "# Secrets are not written to files: they come from the environment."
        required = ':?is a secret: export it, then run this script}"'
        yield from (f': "${{{name}{required}' for name in secrets)
    yield ""
    yield "# The program's own packages, the adapted training backend, this project."
    path = ":".join(filter(None, (*host.python_path, own_path)))
    rest = "" if PYTHON_PATH in references(path) else '"${PYTHONPATH:+:$PYTHONPATH}"'
    yield f"export PYTHONPATH={_with_references(PYTHON_PATH, path, kept)}{rest}"
    yield ""


def _with_references(name: str, value: str, kept: Mapping[str, str]) -> str:
    """A value as one word for bash, which fills in the host's own variables."""
    quoted = []
    for part in parts(name, value):
        if isinstance(part, str):
            quoted.append(_quote(part))
            continue
        before, referred, after = part
        own = kept.get(referred, referred)
        quoted.append(f'"${{{own}:+{before}${own}{after}}}"' if before or after else f'"${own}"')
    return "".join(quoted) or "''"


def _starter(host: HostPlan) -> str:
    """What a script calls what starts its ranks."""
    return "torchrun" if _TORCHRUN in host.starter else "starter"


def _agent_secrets(host: HostPlan) -> list[str]:
    return [value.name for value in host.environment if value.name in AGENT_SECRETS]


def _hide(names: Sequence[str]) -> Iterator[str]:
    """What the agent alone gets to see, and may lack: then a script that is run by hand takes it
    from where the agent has kept it."""
    yield "# For the agent alone: neither the commands below nor the ranks get to see these."
    for number, name in enumerate(names):
        yield f"hidden_{number}=${{{name}-}}"
    yield f"unset {' '.join(names)}"
    yield "give_secrets() {"
    for number, name in enumerate(names):
        yield f"    export {name}=$hidden_{number}"
    yield "}"


def _argvs(plan: LaunchPlan, host: HostPlan) -> Iterator[str]:
    what = "training program" if _TORCHRUN in host.starter else "command"
    yield f"# Supervisor, launcher of the ranks, {what}."
    yield _array("agent", _agent(host))
    yield _array(_starter(host), host.starter)
    yield _array("program", host.program)
    if secret := _agent_secrets(host):
        yield from _hide(secret)
    yield ""
    yield "# experiment.cmds, verbatim."
    looks = [host.before_start]
    if host.unprobed:
        looks += [f"processes={host.nproc}", bash("unprobed_machine.sh")]
        looks += defaults_of_unprobed()
        if len(plan.hosts) > 1:
            looks += [f"master={_word(plan.master_addr)}", bash("unprobed_network.sh")]
    yield from _verbatim("before_start", "\n".join(filter(None, looks)))
    yield from _verbatim("after_stop", host.after_stop)
    yield ""


def _agent(host: HostPlan) -> tuple[str, ...]:
    # JSON has no line ends within its texts: its lines may be set in as those of the array are.
    lines = host.agent.to_json().split("\n")
    pieces = range(0, len(lines), _PIECE_LINES)
    options = ("\n    ".join(lines[at : at + _PIECE_LINES]) for at in pieces)
    program = (host.python, *started("flagscale.launcher.agent", Path(host.python_path[-1])))
    meeting = ("--meeting", reference(MEETING)) if host.late else ()
    return (*program, "--options", *options, *meeting)


def _array(name: str, argv: Sequence[str]) -> str:
    """A bash array, an option and its values a line."""
    lines: list[list[str]] = []
    for word in argv:
        if not lines or word.startswith("--"):
            lines.append([])
        lines[-1].append(_word(word))
    body = "\n".join(f"    {' '.join(line)}" for line in lines)
    return f"{name}=(\n{body}\n)"


def _verbatim(name: str, text: str) -> Iterator[str]:
    """A variable that holds a text as it is, readable, whatever is in it."""
    if not text.strip():
        yield f"{name}="
        return
    delimiter = f"END_{name.upper()}"
    while delimiter in text:
        delimiter += "_"
    yield f"IFS= read -r -d '' {name} <<'{delimiter}'"
    yield text.rstrip("\n")
    yield delimiter
