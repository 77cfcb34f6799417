"""Parameters that Muon trains, by their names and numbers of dimensions."""

from __future__ import annotations

import pytest

from flagscale.config.arguments.derive import derive_arguments
from flagscale.config.arguments.parameters import list_layer_parameters
from flagscale.config.arguments.rules.muon import is_muon_parameter
from flagscale.config.arguments.spec.command_line import parse_arguments
from flagscale.estimate.muon import is_muon_weight

MODEL = """
--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --train-iters 3 --lr 2e-3
--vocab-size 500 --mock-data --optimizer muon --qk-layernorm
"""
MIXTURE = f"""
{MODEL} --num-experts 4 --moe-router-topk 2 --moe-shared-expert-intermediate-size 64
--moe-shared-expert-gate --disable-bias-linear
"""
LATENT = f"""
{MIXTURE} --multi-latent-attention --q-lora-rank 24 --kv-lora-rank 12 --qk-head-dim 12
--qk-pos-emb-head-dim 4 --v-head-dim 10 --position-embedding-type rope
"""


@pytest.mark.parametrize(
    ("name", "dimensions", "expected"),
    [
        ("module.decoder.layers.0.self_attention.linear_qkv.weight", 2, True),
        ("module.decoder.layers.0.mlp.router.weight", 2, True),
        ("module.decoder.layers.0.mlp.experts.linear_fc1.weight", 3, True),
        ("module.mtp.layers.0.eh_proj.weight", 2, True),
        ("module.decoder.layers.0.mlp.linear_fc1.bias", 1, False),
        ("module.decoder.final_layernorm.weight", 1, False),
        ("module.embedding.word_embeddings.weight", 2, False),
        ("module.embedding.position_embeddings.weight", 2, False),
        ("module.output_layer.weight", 2, False),
    ],
)
def test_muon_trains_matrices_of_layers(name: str, dimensions: int, expected: bool) -> None:
    assert is_muon_parameter(name, dimensions) == expected


@pytest.mark.parametrize(
    ("model", "is_moe"),
    [(MODEL, False), (MIXTURE, False), (MIXTURE, True), (LATENT, True)],
    ids=["dense", "dense-without-biases", "mixture", "latent"],
)
def test_an_estimate_recognizes_matrices_by_their_names(model: str, is_moe: bool) -> None:
    values = vars(derive_arguments(parse_arguments(model.split()), 1))
    parameters = list_layer_parameters(values, is_moe=is_moe)
    assert {p.name for p in parameters if p.inputs} == {
        p.name for p in parameters if is_muon_weight(f"decoder.layers.0.{p.name}")
    }
    assert all(p.size % p.inputs == 0 for p in parameters if p.inputs)
