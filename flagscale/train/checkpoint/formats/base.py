"""Checkpoint formats: the interface, the registry, and checks that formats share.

A *format* reads a model into a :class:`StoredModel`, whose tensors have megatron.core's names, and
writes one. :mod:`.convert` reads in one format and writes in another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from flagscale.config.arguments.compat.huggingface.models import MTP_LAYERS, config_of
from flagscale.errors import CheckpointError
from flagscale.registry import Registry
from flagscale.train.checkpoint.formats.lazy_tensors import (
    CastTensor,
    LazyTensor,
    MtpSharedTensor,
    ReplicatedTensor,
    Shape,
    count_bytes,
    full_region,
    slice_rows,
    split_region,
)
from flagscale.train.checkpoint.formats.megatron_layout import MegatronLayout
from flagscale.train.checkpoint.formats.resumable_directory import ResumeOptions
from flagscale.train.checkpoint.formats.weight_mappings import WeightSpec, iter_weights

ByteProgress = Callable[[int], None]
"""Callback that is called with the number of bytes processed since its last call."""
InspectModel = Callable[["StoredModel"], None]
"""Callback that is called with a written model before the model gets its final name."""
EXPERT_BIAS_SUFFIX = ".router.expert_bias"
_MAX_LISTED_PROBLEMS = 20
_MAX_LISTED_PARTS = 8
_EMBEDDING = "embedding.word_embeddings.weight"
_OUTPUT_LAYER = "output_layer.weight"
_UNTIED_ARGUMENT = "untie_embeddings_and_output_weights"
_UNEXPECTED_TENSORS_HINT = (
    "the model would be another one without them: its args should say so by num_layers, "
    f"add_bias_linear, add_qkv_bias, qk_layernorm, num_experts, {_UNTIED_ARGUMENT} or the like"
)


@dataclass(frozen=True)
class StoredModel:
    """A model's arguments and its lazily read weights, independent of format.

    Attributes:
        path: directory from which the model was read.
        model_type: Hugging Face's name of the family.
        values: fully resolved arguments that determine the function of the model.
        tensors: weights by the names of :mod:`.weight_mappings`, without vocabulary padding.
        config: the ``config.json`` that came with the model, if any.
        files: files that belong to the model, such as the tokenizer's.
        resume: identity of the conversion, by which an interrupted one is resumed.
        notes: messages for the user about parts that were left out.
        chat_template: text of the chat template that the model was trained with, if it is known.
    """

    path: Path
    model_type: str
    values: Mapping[str, Any]
    tensors: Mapping[str, LazyTensor]
    config: Mapping[str, Any] | None = None
    files: tuple[Path, ...] = ()
    resume: ResumeOptions | None = None
    notes: tuple[str, ...] = ()
    chat_template: str | None = None

    @property
    def total_bytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(map(count_bytes, self.tensors.values()))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights. Expert biases of routers may have a higher precision."""
        return self.tensors[_EMBEDDING].dtype

    def iter_weight_specs(self) -> Iterator[WeightSpec]:
        """Yield the model's tensors with the Hugging Face tensors that make them."""
        return iter_weights(self.model_type, self.values)

    def without_mtp(self, reason: str = f"{MTP_LAYERS} is not set") -> StoredModel:
        """Return the model without multi-token prediction layers; a note gives the reason."""
        if not self.values[MTP_LAYERS]:
            return self
        tensors = {
            name: tensor.replicas[0] if isinstance(tensor, MtpSharedTensor) else tensor
            for name, tensor in self.tensors.items()
            if not name.startswith("mtp.")
        }
        note = f"its multi-token prediction layers are left out: {reason}"
        values = {**self.values, MTP_LAYERS: None}
        return replace(self, values=values, tensors=tensors, notes=(*self.notes, note))

    def cast(self, dtype: torch.dtype) -> StoredModel:
        """Return the model in another dtype.

        Expert biases of routers stay as they are: their updates are smaller than 16 bits can
        represent.
        """
        tensors = {
            name: tensor if name.endswith(EXPERT_BIAS_SUFFIX) else CastTensor(tensor, dtype)
            for name, tensor in self.tensors.items()
        }
        return replace(self, tensors=tensors)


@runtime_checkable
class CheckpointFormat(Protocol):
    """On-disk format of a model. Entry points of ``flagscale.checkpoint_formats`` implement it.

    Attributes:
        name: name of the format for ``flagscale convert --to``.
    """

    name: str

    def recognises(self, path: Path) -> bool:
        """Return whether a directory holds a model in this format."""

    def read(self, path: Path) -> StoredModel:
        """Open the model in a directory. Its tensors are read on demand.

        Raises:
            CheckpointError: the model is damaged or not supported.
        """

    def write(
        self, model: StoredModel, path: Path, report: ByteProgress, inspect: InspectModel
    ) -> Path:
        """Write a model to a directory that does not exist yet or is empty.

        An interrupted write, or an exception of ``inspect``, leaves nothing that looks complete.

        Args:
            model: the model to write.
            path: directory to write.
            report: called with the number of bytes after each chunk.
            inspect: called with the written model before it gets its final name.

        Returns:
            The path of the written model.

        Raises:
            CheckpointError: the format cannot represent the model.
        """


@runtime_checkable
class LayoutAwareFormat(CheckpointFormat, Protocol):
    """A format whose files depend on the parallel layout."""

    def for_layout(self, layout: MegatronLayout) -> CheckpointFormat:
        """Return the format for a parallel layout."""


FORMATS = Registry(
    "flagscale.checkpoint_formats",
    "checkpoint format",
    {
        "huggingface": "flagscale.train.checkpoint.formats.huggingface:HuggingFace",
        # Ahead of torch_dist, because its directories have the same names.
        "torch": "flagscale.train.checkpoint.formats.megatron_torch:MegatronTorch",
        "megatron_dist": ("flagscale.train.checkpoint.formats.megatron_dist:MegatronDist"),
        "torch_dist": "flagscale.train.checkpoint.formats.torch_dist:TorchDist",
    },
)
"""Formats by the names that ``flagscale convert --to`` takes."""


def detect_format(path: Path) -> CheckpointFormat:
    """Detect the format of a directory.

    Raises:
        CheckpointError: the path is not a directory, or no registered format recognizes it.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory")
    for name in FORMATS.names():
        candidate: CheckpointFormat = FORMATS.create(name, CheckpointFormat)
        if candidate.recognises(path):
            return candidate
    names = ", ".join(FORMATS.names())
    raise CheckpointError(
        f"{path} holds no model in a known format ({names})",
        hint="a directory of Hugging Face has config.json and *.safetensors; one of checkpoints "
        "iter_… directories",
    )


def describe_mismatches(
    path: Path, name: str, parts: Mapping[str, LazyTensor], shapes: Mapping[str, Shape]
) -> Iterator[str]:
    """Yield the reasons why stored tensors cannot be combined into one tensor.

    Reasons are wrong shapes, mixed dtypes, and dtypes other than floating point of 16 bits or more.

    Args:
        path: the checkpoint.
        name: name of the combined tensor.
        parts: stored tensors, by name.
        shapes: expected shape of each stored tensor.
    """
    for part, shape in shapes.items():
        if parts[part].shape != shape:
            yield f"{part}: expected shape {list(shape)}, found {list(parts[part].shape)}"
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in parts.values()}
    if len(dtypes) > 1:
        unlisted = len(parts) - _MAX_LISTED_PARTS
        names = ", ".join([*parts][:_MAX_LISTED_PARTS]) + (
            f" and {unlisted} more" if unlisted > 0 else ""
        )
        yield f"{names}: one precision expected, found {' and '.join(sorted(dtypes))}"
    for part, tensor in parts.items():
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            dtype = str(tensor.dtype).removeprefix("torch.")
            yield f"{part}: expected weights of 16 bits or more, found {dtype}"


def raise_if_any(path: Path, problem: str, items: list[str], hint: str | None = None) -> None:
    """Raise an error that lists problems, if there are any.

    Raises:
        CheckpointError: ``items`` is not empty. At most 20 items are listed.
    """
    if items:
        unlisted = len(items) - _MAX_LISTED_PROBLEMS
        listing = "\n  ".join(
            items[:_MAX_LISTED_PROBLEMS] + ([f"and {unlisted} more"] if unlisted > 0 else [])
        )
        raise CheckpointError(f"{path} {problem}: {listing}", hint=hint)


class TensorMismatchError(Exception):
    """The stored parts of a tensor do not match the model.

    Attributes:
        problems: the reasons.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__(*problems)
        self.problems = problems


class TensorSource(Protocol):
    """Tensors of a checkpoint with foreign names, looked up one by one."""

    def find_tensor(self, spec: WeightSpec) -> LazyTensor | None:
        """Return a tensor of the model, or None if the checkpoint lacks it.

        Raises:
            TensorMismatchError: its shape or dtype is not the expected one.
        """

    def list_unused(self) -> list[str]:
        """List the weights that were not looked up, by their names in the checkpoint."""


def collect_model(path: Path, values: Mapping[str, Any], source: TensorSource) -> StoredModel:
    """Build a model by looking up each of its tensors in a checkpoint, without vocabulary padding.

    Args:
        path: the checkpoint, for error messages.
        values: fully resolved arguments of the model.
        source: the checkpoint's tensors.

    Raises:
        CheckpointError: tensors are missing, do not match the arguments, or are unexpected.
    """
    model_type = config_of(values)["model_type"]
    tensors: dict[str, LazyTensor] = {}
    missing: list[str] = []
    mismatches: list[str] = []
    for spec in StoredModel(path, model_type, values, {}).iter_weight_specs():
        try:
            tensor = _find_tensor(source, spec, values)
        except TensorMismatchError as error:
            mismatches += error.problems
            continue
        if tensor is None:
            missing.append(spec.name)
        else:
            tensors[spec.name] = trim_vocabulary(spec.name, tensor, values)
    raise_if_any(path, "lacks tensors", missing)
    raise_if_any(path, "has tensors that do not fit its arguments", list(dict.fromkeys(mismatches)))
    raise_if_any(
        path,
        "has tensors that its arguments do not imply",
        source.list_unused(),
        _UNEXPECTED_TENSORS_HINT,
    )
    return StoredModel(path, model_type, values, tensors)


def _find_tensor(
    source: TensorSource, spec: WeightSpec, values: Mapping[str, Any]
) -> LazyTensor | None:
    """Find a tensor of the model. An unexpected output layer must equal the embedding."""
    tensor = source.find_tensor(spec)
    if tensor is None or spec.name != _EMBEDDING or values[_UNTIED_ARGUMENT]:
        return tensor
    output_layer = source.find_tensor(replace(spec, name=_OUTPUT_LAYER))
    if output_layer is None:
        return tensor
    mismatch = (
        f"{_OUTPUT_LAYER} is there and is not the embedding, but {_UNTIED_ARGUMENT} is false in "
        "its arguments"
    )
    return ReplicatedTensor((tensor, output_layer), mismatch)


def trim_vocabulary(name: str, tensor: LazyTensor, values: Mapping[str, Any]) -> LazyTensor:
    """Slice an embedding or output layer to the vocabulary; return every other tensor unchanged."""
    if name not in (_EMBEDDING, _OUTPUT_LAYER):
        return tensor
    vocab_size = values["vocab_size"]
    return slice_rows(tensor, 0, vocab_size) if tensor.shape[0] > vocab_size else tensor


NOT_FINITE = "it holds infinities or NaN"
"""Difference that :func:`describe_difference` returns for infinities and NaN."""


def describe_difference(
    tensor: LazyTensor, written: LazyTensor, report: ByteProgress
) -> str | None:
    """Compare two tensors bit by bit and return the first difference, or None.

    Infinities and NaN count as a difference (:data:`NOT_FINITE`).

    Args:
        tensor: the source of the conversion.
        written: the result of the conversion.
        report: called with the number of bytes after each chunk.
    """
    if (tensor.dtype, tensor.shape) != (written.dtype, written.shape):
        return (
            f"{written.dtype} {list(written.shape)}, expected {tensor.dtype} {list(tensor.shape)}"
        )
    for region in split_region(full_region(tensor.shape), tensor.dtype.itemsize):
        expected, actual = (source.read(region).contiguous() for source in (tensor, written))
        if not are_finite(expected):
            return NOT_FINITE
        if not _have_same_bits(expected, actual):
            return "it differs from its source"
        report(expected.nbytes)
    return None


def are_finite(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds neither infinities nor NaN."""
    # An infinity or NaN shows in the minimum and maximum, which take a fraction of the time.
    return not tensor.numel() or bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())


def _have_same_bits(expected: torch.Tensor, actual: torch.Tensor) -> bool:
    """Return whether two contiguous tensors of one shape hold the same bits."""
    # Comparing 8-byte words is several times as fast, if memory is aligned for them.
    tensors = (expected, actual)
    aligned = all(tensor.nbytes % 8 == 0 and tensor.data_ptr() % 8 == 0 for tensor in tensors)
    dtype = torch.int64 if aligned else torch.uint8
    return torch.equal(expected.reshape(-1).view(dtype), actual.reshape(-1).view(dtype))
