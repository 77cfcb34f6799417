"""Number formats of Adam's states and of the gradients it reads, and their rules. No torch.

``use_precision_aware_optimizer`` and the four ``…_dtype`` arguments are Megatron-LM's. Blocks of
:data:`BLOCK_WEIGHTS` values share a scale in the formats :data:`SCALED_FORMATS`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flagscale.config.arguments.spec.argument import Values, Violation

SWITCH = "use_precision_aware_optimizer"
MAIN_GRADS, MAIN_PARAMS = "main_grads_dtype", "main_params_dtype"
FIRST_MOMENT, SECOND_MOMENT = "exp_avg_dtype", "exp_avg_sq_dtype"
OPTIMIZER_DTYPES = (MAIN_GRADS, MAIN_PARAMS, FIRST_MOMENT, SECOND_MOMENT)
REMAINDERS = "store_param_remainders"
BLOCK_WEIGHTS = 128
"""Consecutive values that share a scale, a power of two of which one byte stores the exponent."""
SCALED_FORMATS = ("fp16", "fp8")
"""Formats of moments whose range is too small without a scale."""
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


@dataclass(frozen=True)
class StateFormats:
    """Number formats of the optimizer's states and of gradients.

    ``main_params`` is the format of the weights that Adam updates. If it is the model's own, there
    is no second copy. With ``remainders``, the fp32 weights are kept as the model's bf16 weights
    and the 16 bits that those lack.
    """

    main_params: str = "fp32"
    remainders: bool = False
    first_moment: str = "fp32"
    second_moment: str = "fp32"
    gradients: str = "fp32"

    @property
    def moment_bytes(self) -> float:
        """Bytes of both moments per weight."""
        return _moment_bytes(self.first_moment) + _moment_bytes(self.second_moment)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient."""
        return _BYTES[self.gradients]

    def state_bytes(self, model_format: str) -> float:
        """Return the bytes of the states per weight, in the device's memory or the host's, in
        addition to the model's own weight, whose format is ``model_format``.
        """
        is_in_place = self.main_params == model_format
        main_params = 0 if is_in_place else 2 if self.remainders else _BYTES[self.main_params]
        return main_params + self.moment_bytes


FP32_STATES = StateFormats()


def _moment_bytes(name: str) -> float:
    return _BYTES[name] + (1 / BLOCK_WEIGHTS if name in SCALED_FORMATS else 0)


def model_format(values: Values) -> str:
    """Return the format of the model's weights."""
    return "bf16" if values["bf16"] else "fp16" if values["fp16"] else "fp32"


def state_formats(values: Values) -> StateFormats:
    """Return the formats of valid arguments."""
    if not values[SWITCH]:
        return FP32_STATES
    main_params = _value(values, MAIN_PARAMS)
    return StateFormats(
        main_params,
        main_params == "fp32" and model_format(values) == "bf16" and bool(values[REMAINDERS]),
        _value(values, FIRST_MOMENT),
        _value(values, SECOND_MOMENT),
        _value(values, MAIN_GRADS),
    )


def _value(values: Values, name: str) -> str:
    return values[name] or "fp32"


def check_optimizer_states(values: Values) -> Iterator[Violation]:
    """Check the formats, and that they go together with the other arguments."""
    if not values[SWITCH]:
        for name in OPTIMIZER_DTYPES:
            if _value(values, name) != "fp32":
                yield name, f"{values[name]} requires {SWITCH}: true"
        return
    if values["optimizer"] != "adam":
        yield SWITCH, f"requires optimizer: adam, found {values['optimizer']}"
    if not values["use_distributed_optimizer"]:
        yield SWITCH, "requires use_distributed_optimizer: true"
    yield from _check_main_params(values)
    yield from _check_main_grads(values)
    if values["enable_hetero"] and values["hetero_mode"] != "dp":
        # Meshes hold copies of an embedding in different layouts and would round them differently.
        for name in OPTIMIZER_DTYPES:
            if _value(values, name) != "fp32":
                yield name, f"{values[name]} is not supported on meshes (enable_hetero); use fp32"


def _check_main_params(values: Values) -> Iterator[Violation]:
    main_params, model = _value(values, MAIN_PARAMS), model_format(values)
    if main_params in ("fp32", model):
        return
    if model == "bf16":
        hint = (
            f"use fp32, which takes 2 bytes a weight next to bf16 weights ({REMAINDERS}), or bf16, "
            "which takes none"
        )
    else:
        hint = f"use fp32{'' if model == 'fp32' else f' or {model}'}"
    yield MAIN_PARAMS, f"{main_params} is not supported for a model in {model}; {hint}"


def _check_main_grads(values: Values) -> Iterator[Violation]:
    main_grads, model = _value(values, MAIN_GRADS), model_format(values)
    if main_grads == "fp32":
        return
    if main_grads != "bf16":
        yield MAIN_GRADS, f"{main_grads} is not supported; use fp32 or bf16"
    elif model != "bf16":
        yield MAIN_GRADS, f"bf16 requires a model in bf16, found {model}"
    elif values["grad_reduce_in_fp32"]:
        yield (
            MAIN_GRADS,
            "bf16 cannot be combined with accumulate_allreduce_grads_in_fp32; leave one out",
        )
