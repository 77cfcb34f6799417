"""What must hold between the values of an experiment, before anything starts.

Pure: nothing here looks at the machine. Every check yields problems whose key is the argument as
the YAML gives it. A external training program's own rules are its own; only what holds for any
Megatron (ranks and batches divide evenly) is checked for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from flagscale.config.arguments import (
    adapters,
    bounded,
    fallbacks,
    growth,
    idle,
    layout,
    paths,
    rules,
    schedule,
)
from flagscale.config.arguments.external import is_external
from flagscale.config.arguments.flatten import leaves
from flagscale.config.arguments.foreign import EXPERIMENT, remark
from flagscale.config.arguments.parser import canonicalise
from flagscale.config.arguments.pipeline import virtual_chunks
from flagscale.config.arguments.registry import aliases, arguments, lookup, registry
from flagscale.config.arguments.values import shown
from flagscale.config.host_overrides import specific_notes
from flagscale.config.schema import Experiment, Slurm
from flagscale.errors import Problem


@cache
def _defaults() -> dict[str, Any]:
    return {name: argument.default for name, argument in arguments().items()}


@dataclass(frozen=True)
class Arguments:
    """The arguments of an experiment, aliases canonical, defaults filled in."""

    given: Mapping[str, Any]
    keys: Mapping[str, str]
    """The dotted key that gave an argument; an alias has its own entry beside its target's."""
    foreign: tuple[str, ...]
    """Names of Megatron-LM that are taken and have no effect."""
    written: Mapping[str, Any]
    """Values by the names that the YAML uses, aliases among them."""
    sources: Mapping[str, str]

    @classmethod
    def of(cls, experiment: Experiment) -> Arguments:
        """Those that every host has. What does not fit is left out; loading reports it."""
        return cls.of_sections(experiment.train.sections(), experiment.sources)

    @classmethod
    def of_sections(cls, sections: Mapping[str, Any], sources: Mapping[str, str]) -> Arguments:
        """Those of the sections of ``train``, as they are for one host."""
        given: dict[str, Any] = {}
        keys: dict[str, str] = {}
        written: dict[str, Any] = {}
        foreign: list[str] = []
        for path, name, value in leaves(sections, "train."):
            try:
                canonical = canonicalise(name, value)
            except ValueError:
                continue
            if lookup(name) is None and value is not False:
                foreign.append(name)
            written[name] = value
            keys[name] = path
            if canonical is not None:
                given[canonical[0]] = canonical[1]
                keys[canonical[0]] = path
        return cls(given, keys, tuple(foreign), written, sources)

    def __getitem__(self, name: str) -> Any:
        return self.given.get(name, arguments()[name].default)

    def values(self) -> dict[str, Any]:
        """Every argument by name, defaults filled in."""
        return {**_defaults(), **self.given}

    def problem(self, name: str, message: str) -> Problem:
        """A problem with an argument, at the place where it is given."""
        key = self.keys.get(name) or f"train.{registry()[name].section}.{name}"
        message += self._meaning(name, key.rpartition(".")[2].replace("-", "_"))
        return Problem(key, message, self.sources.get(key))

    def _meaning(self, name: str, written: str) -> str:
        """What an argument's value comes from, where the YAML says the opposite or a switch."""
        found = lookup(written)
        if written == name or found is None or found[1] is None or found[1].rule == "same":
            return ""
        said, meant = shown(self.written[written]), shown(self.given[name])
        return f" (`{written}: {said}` is `{name}: {meant}`)"


def check_arguments(experiment: Experiment) -> list[Problem]:
    """Problems that do not depend on the number of ranks."""
    if experiment.task.external:
        return []
    args = Arguments.of(experiment)
    values = {**args.values(), **_saved(experiment)}
    broken = [*rules.broken(values), *_bounded_by_environment(experiment, values)]
    problems = [args.problem(name, message) for name, message in dict.fromkeys(broken)]
    return [*problems, *_spelling(args), *_interleaving(args), *_data(args)]


def _saved(experiment: Experiment) -> dict[str, Any]:
    """That checkpoints are saved in the experiment's directory where the YAML does not say where,
    nor by ``save: null`` that none are."""
    names = {name for _, name, _ in leaves(experiment.train.sections(), nulls=True)}
    return {} if "save" in names else {"save": str(experiment.exp_dir / "checkpoints")}


def _bounded_by_environment(
    experiment: Experiment, values: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """What keeps sums exact that a variable of the ranks asks to be bounded."""
    envs = experiment.envs
    every = (envs.common, *envs.by_type.values(), *envs.by_host.values())
    if bounded.VARIABLE in [pair for variables in every for pair in variables.items()]:
        yield from bounded.exact_anyway(values, "FSCCL_TAIL=bounded of experiment.envs")


def check_places(experiment: Experiment) -> list[Problem]:
    """Directories that are to be written and lie where the kernel shows itself as files."""
    written: list[tuple[str, Any]] = [
        ("experiment.exp_dir", experiment.exp_dir),
        ("experiment.runner.log_dir", experiment.runner.log_dir),
    ]
    problems = []
    for key, name, value in leaves(experiment.train.sections(), "train."):
        if name in paths.WRITTEN and name != "load":
            written.append((key, value))
        if name in paths.WRITTEN and isinstance(value, str):
            complaint = None if name == "load" else paths.too_long(value)
            if value in paths.NO_PATH and not experiment.task.external:
                complaint = f"expected a directory, found {value!r}; null leaves it out"
            if complaint:
                problems.append(Problem(key, complaint, experiment.sources.get(key)))
    return problems + [
        Problem(
            key,
            f"{path} lies in {kernels}, whose files are the kernel's and no disk's; choose another "
            "directory",
            experiment.sources.get(key),
        )
        for key, path in written
        if path is not None and (kernels := paths.kernels_own(str(path))) is not None
    ]


def check_world(experiment: Experiment, world_size: int) -> list[Problem]:
    """Problems of ``world_size`` ranks, as planned, with the layout and the batch sizes."""
    if experiment.task.is_command:
        return []
    args = Arguments.of(experiment)
    broken = layout.broken_world(args.values(), world_size)
    return [args.problem(name, message) for name, message in broken]


def notes(experiment: Experiment, world_size: int) -> list[str]:
    """What is worth saying about an experiment that is not wrong."""
    found: list[str] = []
    if experiment.task.is_command:
        found += _unused(experiment)
    elif experiment.task.external:
        found.append(
            f"{experiment.task.entrypoint.name} is not this project's training program: its own "
            "parser judges the arguments"
        )
    found += [f"{key} has no effect: {_unneeded(key)}" for key in experiment.idle]
    found += specific_notes(experiment)
    if experiment.runner.type != "slurm" and experiment.runner.slurm != Slurm():
        found.append("experiment.runner.slurm has no effect without type: slurm")
    if not experiment.runner.enable_monitoring:
        found.append(
            "experiment.runner.enable_monitoring: false has no effect: a run's own agents watch it"
        )
    args = Arguments.of(experiment)
    if not experiment.task.external:
        found += _replaced_and_idle(args)
        found += _filled(experiment, args)
        found += _anew(experiment)
        found += _behind_the_end(args, world_size)
    samples = args["train_samples"]
    batch = layout.global_batch_size(args.values(), world_size) if samples else 0
    if samples and batch:
        steps, rest = divmod(samples, batch)
        text = f"{steps} steps: train_samples {samples} / global_batch_size {batch}"
        if grows := growth.growth_of(args.values()):
            steps, rest = grows.steps(0, samples), 0
            text = f"{steps} steps: train_samples {samples}, the batch grows from {grows.start} to "
            text += f"{grows.final} over {grows.samples}"
        over = f" is not whole: the last {rest} samples are not used"
        found.append(text + (over if rest else ""))
    shares = rules.split_shares(args["split"] or "")
    evaluates = args["eval_iters"] and args["data_path"] and not args["valid_data_path"]
    if shares is not None and evaluates and not shares[1]:
        found.append(f"no evaluation: split {args['split']} leaves nothing to validate on")
    return found


def _unneeded(key: str) -> str:
    """Why a key of ``experiment`` that is none of the launcher's has no effect."""
    own = f"no key takes its value from it by ${{{key}}}"
    return EXPERIMENT.get(key.removeprefix("experiment."), own)


def _unused(experiment: Experiment) -> Iterator[str]:
    """What a YAML says of training, where a command is run."""
    given = experiment.resolved
    task = given.get("experiment", {}).get("task", {})
    keys = ["train"] if any((given.get("train") or {}).values()) else []
    keys += ["experiment.task.entrypoint"] if task.get("entrypoint") else []
    if keys:
        have = "has" if len(keys) == 1 else "have"
        yield f"{' and '.join(keys)} {have} no effect: experiment.task.type is command"


def _filled(experiment: Experiment, args: Arguments) -> Iterator[str]:
    """The arguments that the model to start from gives."""
    if experiment.filled:
        names = ", ".join(sorted(experiment.filled))
        yield f"{names}: as {args['pretrained_checkpoint']}/config.json says"


def _anew(experiment: Experiment) -> Iterator[str]:
    """That ``load: null``, which FlagScale takes for a key that is missing, is meant."""
    for path, name, value in leaves(experiment.train.sections(), "train.", nulls=True):
        if name == "load" and value is None:
            yield (
                f"{path}: null: every start is one from step 0, whatever was saved; without the "
                "key it goes on from the experiment's newest checkpoint"
            )


def _behind_the_end(args: Arguments, world_size: int) -> Iterator[str]:
    """What would come after the last step."""
    values = args.values()
    if any(values[name] for name in schedule.PLANNED):
        batch = layout.global_batch_size(values, world_size)
        for name, reason in schedule.notes(values, batch):
            yield idle.sentence([args.keys[name].rpartition(".")[2]], reason)


def _replaced_and_idle(args: Arguments) -> Iterator[str]:
    """Arguments for which another value is taken, and those that have no effect."""
    values = args.values()
    for name, message in fallbacks.notes(values):
        yield f"{args.problem(name, '').key}: {message}"
    yield from adapters.notes(values)
    for names, reason in idle.notes(values, args.given):
        yield idle.sentence([args.keys[name].rpartition(".")[2] for name in names], reason)
    for name, alias in aliases().items():
        given = args.written.get(name)
        if alias.rule == "none" and alias.idle is not None and given is alias.idle:
            yield idle.sentence([name], alias.doc)
    for name in args.foreign:
        yield idle.sentence([name], str(remark(name)))


def _spelling(args: Arguments) -> Iterator[Problem]:
    """Megatron-LM's switches that say nothing by themselves must agree with what they stand by."""
    grouped, groups = args.written.get("group_query_attention"), args["num_query_groups"]
    if grouped is True and groups is None:
        yield args.problem("group_query_attention", "needs num_query_groups")
    elif grouped is False and groups is not None:
        message = f"false contradicts num_query_groups {groups}; remove one"
        yield args.problem("group_query_attention", message)
    learned = args["position_embedding_type"] == "learned_absolute"
    if args.written.get("no_position_embedding") is True and learned:
        message = "say which instead: `position_embedding_type: rope` or `none`"
        yield args.problem("no_position_embedding", message)


def _interleaving(args: Arguments) -> Iterator[Problem]:
    """The training program sets both; a YAML must not ask for the opposite."""
    interleaved = args["num_layers"] and virtual_chunks(args.values())
    if not interleaved:
        return
    reason = "stages that hold several model chunks would get each other's tensors"
    if args.given.get("overlap_p2p_comm") is False:
        yield args.problem("overlap_p2p_comm", f"must be true: otherwise {reason}")
    if args.given.get("batch_p2p_comm") is True:
        yield args.problem("batch_p2p_comm", f"must be false: otherwise {reason}")


def _data(args: Arguments) -> Iterator[Problem]:
    sets = ("data_path", "train_data_path")
    brought = args["mock_data"] or is_external(args.values())
    if not brought and all(args[name] is None for name in sets):
        yield args.problem("data_path", "is required (or `mock_data: true`)")
    given = [name for name in sorted(paths.DATA) if args[name] is not None]
    for name in given:
        if message := paths.blend_problem(args[name]):
            yield args.problem(name, message)
    for text in args["data_phases"] or ():
        if message := paths.phase_problem(text):
            yield args.problem("data_phases", message)
    if given and args["mock_data"]:
        yield args.problem("mock_data", f"makes data up, but {given[0]} is set")
    elif len(given) > 1 and given[0] == "data_path":
        yield args.problem(given[1], "excludes data_path: use one or the other")
