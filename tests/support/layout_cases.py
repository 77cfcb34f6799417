"""Parallel layouts of tiny models, and the reference runs whose results they must reproduce."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from flagscale.config.arguments.spec.command_line import command_line
from flagscale.config.arguments.spec.train_arguments import TrainArguments
from flagscale.config.load import load
from support.arguments import flatten
from support.layout_meshes import TP2_DP2, mesh_options, replica_options
from support.layout_models import (
    AUTO_RECOMPUTE,
    BERT,
    BERT_MOE,
    BF16,
    COMPILED,
    CP2,
    CP2_GATHER,
    CP2_RING,
    CP4_HIERARCHICAL,
    CP4_RING,
    CUDA_GRAPH,
    DISTRIBUTED_OPTIMIZER,
    DIVISIBLE_BY_SIX,
    EP2,
    FAST_BACKEND,
    FP16,
    FP16_HYSTERESIS_1,
    FULL_RECOMPUTE,
    GEMMA,
    GEMMA_MASKED_DOCUMENTS,
    GPT2,
    GROUPED_EXPERTS,
    HYBRID,
    LEAN_BF16,
    LEAN_FP16,
    LEAN_MOMENTS,
    LION,
    LION_MOE,
    LLAMA,
    LORA,
    LORA_SOME_LAYERS,
    MASKED_DOCUMENTS,
    MBS2,
    MBS3,
    MLA,
    MLA_BF16,
    MLA_LORA,
    MLA_MASKED_DOCUMENTS,
    MLA_MOE,
    MLA_MOE_LORA,
    MLA_MOE_LORA_EXPERTS,
    MOE,
    MOE_ALL_LOSSES,
    MOE_AUX_LOSS,
    MOE_LORA,
    MOE_RAMPUP,
    MOE_SEQ_AUX_LOSS,
    MTP,
    MTP_LORA,
    MTP_MOE,
    MTP_TIED,
    MUON,
    MUON_MLA,
    MUON_MOE,
    OFFLOAD,
    OFFLOAD_LAYERS,
    OFFLOAD_MODULES,
    OVERLAP,
    PER_TOKEN,
    PP2,
    PRECISION_AWARE,
    RECOMPUTE_GRANULARITY,
    RECOMPUTE_LAYERS,
    ROTARY_BERT,
    SELECTIVE,
    SFT,
    SHARD_GRADIENTS,
    SHARD_WEIGHTS,
    SHARED_PRODUCTS,
    SHORT_BF16,
    TIED,
    TP2,
    TP2_SP,
    TP_OVERLAP,
    VPP2,
    LayoutCase,
)

ROOT = Path(__file__).parents[2]


# Positional fields of LayoutCase: name, world_size, model, layout, reference. A reference case has
# no arguments of a layout unless it changes the batch, and the reference "".
FP8_FROZEN = f"{COMPILED} --fp8 hybrid --freeze-parameters embedding decoder.layers.*.mlp"

REFERENCE_CASES = (
    LayoutCase("llama", 1, LLAMA, "", ""),
    LayoutCase("tied", 1, TIED, "", ""),
    LayoutCase("gpt2", 1, GPT2, "", ""),
    LayoutCase("moe", 1, MOE, "", ""),
    LayoutCase("moe-aux-loss", 1, MOE_AUX_LOSS, "", ""),
    LayoutCase("moe-seq-aux-loss", 1, MOE_SEQ_AUX_LOSS, "", ""),
    LayoutCase("moe-rampup", 1, MOE_RAMPUP, "", ""),
    LayoutCase("all-losses-mbs2", 1, MOE_ALL_LOSSES, MBS2, ""),
    LayoutCase("all-losses-mbs3", 1, MOE_ALL_LOSSES, MBS3, ""),
    LayoutCase("bf16", 1, BF16, "", ""),
    LayoutCase("bf16-short", 1, SHORT_BF16, "", ""),
    LayoutCase("fp8-frozen", 1, SHORT_BF16, FP8_FROZEN, ""),
    LayoutCase("fp16-overflow", 1, FP16_HYSTERESIS_1, "", "", overflow=(0, 1)),
    LayoutCase("llama-6", 1, LLAMA, "--global-batch-size 6", ""),
    LayoutCase("tied-6", 1, TIED, "--global-batch-size 6", ""),
    LayoutCase("gemma", 1, GEMMA, "", ""),
    LayoutCase("mla", 1, MLA, "", ""),
    LayoutCase("mla-moe", 1, MLA_MOE, "", ""),
    LayoutCase("mla-bf16", 1, MLA_BF16, "", ""),
    LayoutCase("gemma-masked", 1, GEMMA_MASKED_DOCUMENTS, "", ""),
    LayoutCase("mla-masked", 1, MLA_MASKED_DOCUMENTS, "", ""),
    LayoutCase("mla-lora", 1, MLA_LORA, "", ""),
    LayoutCase("mla-moe-lora", 1, MLA_MOE_LORA, "", ""),
    LayoutCase("mla-moe-lora-experts", 1, MLA_MOE_LORA_EXPERTS, "", ""),
    LayoutCase("moe-lora", 1, MOE_LORA, "", ""),
    LayoutCase("bert", 1, BERT, "", ""),
    LayoutCase("bert-rotary", 1, ROTARY_BERT, "", ""),
    LayoutCase("bert-moe", 1, ROTARY_BERT + BERT_MOE, "", ""),
    LayoutCase("bert-bf16", 1, BERT + "--bf16", "", ""),
    LayoutCase("masked", 1, MASKED_DOCUMENTS, "", ""),
    LayoutCase("sft", 1, SFT, "", ""),
    LayoutCase("lora", 1, LORA, "", ""),
    LayoutCase("lora-some-layers", 1, LORA_SOME_LAYERS, "", ""),
    LayoutCase("lora-base", 1, SFT, "--train-iters 1 --lr 0", ""),
    LayoutCase("masked-per-token", 1, MASKED_DOCUMENTS, PER_TOKEN, ""),
    LayoutCase(
        "masked-learned-positions",
        1,
        MASKED_DOCUMENTS,
        "--position-embedding-type learned_absolute",
        "",
    ),
    LayoutCase("mtp", 1, MTP, "", ""),
    LayoutCase("mtp-lora", 1, MTP_LORA, "", ""),
    LayoutCase("mtp-per-token", 1, MTP, f"{PER_TOKEN} {MBS2}", ""),
    LayoutCase("mtp-tied", 1, MTP_TIED, "", ""),
    LayoutCase("mtp-moe", 1, MTP_MOE, "", ""),
    LayoutCase("lion", 1, LION, "", ""),
    LayoutCase("lion-moe", 1, LION_MOE, "", ""),
    LayoutCase("lion-fp16", 1, LION + "--fp16 --initial-loss-scale 4096", "", ""),
    LayoutCase("muon", 1, MUON, "", ""),
    LayoutCase("muon-moe", 1, MUON_MOE, "", ""),
    LayoutCase("muon-mla", 1, MUON_MLA, "", ""),
    LayoutCase("muon-bf16", 1, MUON + "--bf16", "", ""),
    LayoutCase("divisible-by-six", 1, DIVISIBLE_BY_SIX, "--make-vocab-size-divisible-by 384", ""),
)
HOMOGENEOUS_CASES = (
    LayoutCase("local-attention", 1, LLAMA, "--attention-backend local", "llama"),
    LayoutCase("recompute-full", 1, LLAMA, f"{FULL_RECOMPUTE} 1", "llama"),
    LayoutCase("recompute-auto", 1, LLAMA, f"{AUTO_RECOMPUTE} 0.0036", "llama"),
    LayoutCase("recompute-selective", 1, LLAMA, "--recompute-granularity selective", "llama"),
    LayoutCase("selective", 1, LLAMA, f"{SELECTIVE} layernorm mlp core_attn", "llama", 1e-6),
    LayoutCase("gpt2-tp2-selective", 2, GPT2, f"{TP2} {SELECTIVE} layernorm mlp", "gpt2"),
    LayoutCase("cp2-selective", 2, LLAMA, f"{CP2_GATHER} {SELECTIVE} core_attn layernorm", "llama"),
    LayoutCase("pp2-vpp2-tied-selective", 2, TIED, f"{VPP2} {SELECTIVE} layernorm mlp", "tied"),
    LayoutCase("lora-selective", 1, LORA, f"{SELECTIVE} layernorm mlp", "lora"),
    LayoutCase("moe-aux-loss-selective", 1, MOE_AUX_LOSS, f"{SELECTIVE} moe", "moe-aux-loss"),
    LayoutCase(
        "moe-grouped-ep2-selective",
        2,
        MOE,
        f"{GROUPED_EXPERTS} {EP2} {SELECTIVE} moe_act layernorm",
        "moe",
    ),
    LayoutCase(
        "mla-moe-selective",
        1,
        MLA_MOE,
        f"{SELECTIVE} mla_up_proj core_attn layernorm mlp shared_experts",
        "mla-moe",
    ),
    LayoutCase(
        "compiled-tp2-sp-selective",
        2,
        LLAMA,
        f"{COMPILED} {TP2_SP} {SELECTIVE} layernorm mlp core_attn",
        "llama",
        backend=FAST_BACKEND,
    ),
    LayoutCase(
        "compiled-mla-moe-selective",
        1,
        MLA_MOE,
        f"{COMPILED} {GROUPED_EXPERTS} {SELECTIVE} mla_up_proj layernorm moe_act",
        "mla-moe",
    ),
    LayoutCase("compiled-cp2-selective", 2, LLAMA, f"{COMPILED} {CP2} {SELECTIVE} mlp", "llama"),
    LayoutCase("offload-layers", 1, LLAMA, f"{OFFLOAD_LAYERS} 3", "llama", 0.0),
    LayoutCase(
        "offload-layers-selective",
        1,
        LLAMA,
        f"{OFFLOAD_LAYERS} 2 {SELECTIVE} layernorm mlp",
        "selective",
        1e-6,
    ),
    LayoutCase("tp2-sp-offload-layers", 2, LLAMA, f"{TP2_SP} {OFFLOAD_LAYERS} 2", "llama"),
    LayoutCase(
        "compiled-dp2-sharded-selective-offload",
        2,
        LLAMA,
        f"{COMPILED} {SHARD_WEIGHTS} {SELECTIVE} layernorm mlp {OFFLOAD_LAYERS} 3",
        "llama",
    ),
    LayoutCase("pp2-offload-layers", 2, TIED, f"{PP2} {OFFLOAD_LAYERS} 1", "tied"),
    LayoutCase(
        "offload-modules",
        1,
        LLAMA,
        f"{OFFLOAD_MODULES} attn_norm qkv_linear core_attn attn_proj mlp_norm",
        "llama",
        0.0,
    ),
    LayoutCase(
        "moe-grouped-ep2-offload-modules",
        2,
        MOE,
        f"{GROUPED_EXPERTS} {EP2} {OFFLOAD_MODULES} expert_fc1 moe_act core_attn",
        "moe",
    ),
    LayoutCase("cp2-offload-layers", 2, LLAMA, f"{CP2_GATHER} {OFFLOAD_LAYERS} 3", "llama"),
    LayoutCase("mla-moe-offload-layers", 1, MLA_MOE, f"{OFFLOAD_LAYERS} 3", "mla-moe", 0.0),
    LayoutCase(
        "compiled-offload-layers",
        1,
        LLAMA,
        f"{COMPILED} {OFFLOAD_LAYERS} 3 {SELECTIVE} layernorm",
        "llama",
    ),
    LayoutCase("per-token-loss", 1, LLAMA, PER_TOKEN, "llama"),
    LayoutCase("dp2", 2, LLAMA, "", "llama"),
    LayoutCase("dp2-do", 2, LLAMA, DISTRIBUTED_OPTIMIZER, "llama"),
    LayoutCase("offload", 1, LLAMA, OFFLOAD, "llama", 1e-6),
    LayoutCase(
        "bf16-dp2-offload-half",
        2,
        BF16,
        f"{OFFLOAD} --optimizer-offload-fraction 0.5 --overlap-grad-reduce --overlap-param-gather",
        "bf16",
        1e-3,
    ),
    LayoutCase("fp16-offload", 1, FP16, OFFLOAD, "fp16", 1e-3),
    LayoutCase("moe-ep2-offload", 2, MOE, f"{OFFLOAD} --expert-model-parallel-size 2", "moe"),
    LayoutCase("bf16-remainders", 1, BF16, PRECISION_AWARE, "bf16", 1e-4),
    LayoutCase(
        "bf16-tp2-remainders-whole",
        2,
        BF16,
        f"{TP2} {PRECISION_AWARE} --no-store-param-remainders --exp-avg-dtype bf16 "
        "--exp-avg-sq-dtype bf16",
        "bf16",
        2e-2,
        FAST_BACKEND,
    ),
    LayoutCase(
        "bf16-dp2-lean-overlap",
        2,
        BF16,
        f"{LEAN_BF16} --overlap-grad-reduce --overlap-param-gather",
        "bf16",
        1e-2,
    ),
    LayoutCase("lean", 1, LLAMA, LEAN_MOMENTS, "llama", 1e-2),
    LayoutCase("compiled-bf16-lean", 1, BF16, f"{COMPILED} {LEAN_BF16}", "bf16", 1e-2),
    LayoutCase("fp16-lean-offload", 1, FP16, f"{LEAN_FP16} --optimizer-cpu-offload", "fp16", 1e-2),
    LayoutCase("tied-pp2-lean", 2, TIED, f"{PP2} {LEAN_MOMENTS}", "tied", 1e-2),
    LayoutCase(
        "moe-ep2-lean-offload-half",
        2,
        MOE,
        f"{LEAN_MOMENTS} {EP2} --optimizer-cpu-offload --optimizer-offload-fraction 0.5",
        "moe",
        1e-2,
    ),
    LayoutCase("lion-pp2-vpp2-do-overlap", 2, LION, f"{VPP2} {OVERLAP}", "lion"),
    LayoutCase("lion-dp2-sharded", 2, LION, SHARD_WEIGHTS, "lion"),
    LayoutCase("lion-tp2", 2, LION, TP2, "lion", backend=FAST_BACKEND),
    LayoutCase("lion-moe-ep2", 2, LION_MOE, EP2, "lion-moe"),
    LayoutCase(
        "lion-fp16-dp2-do",
        2,
        LION + "--fp16 --initial-loss-scale 4096",
        DISTRIBUTED_OPTIMIZER,
        "lion-fp16",
    ),
    LayoutCase("muon-pp2-vpp2-do-overlap", 2, MUON, f"{VPP2} {OVERLAP}", "muon"),
    LayoutCase("muon-dp2-sharded", 2, MUON, SHARD_WEIGHTS, "muon"),
    LayoutCase("muon-tp2", 2, MUON, TP2, "muon", backend=FAST_BACKEND),
    LayoutCase(
        "muon-tp2-dp2-sp-sharded",
        4,
        MUON,
        f"{TP2_SP} {SHARD_WEIGHTS} {SHARED_PRODUCTS}",
        "muon",
        backend=FAST_BACKEND,
    ),
    LayoutCase(
        "muon-mesh-tp2+dp2-sp-do",
        4,
        MUON,
        mesh_options(TP2_DP2, "3 1", f"{MBS2} {DISTRIBUTED_OPTIMIZER} --sequence-parallel"),
        "muon",
        backend=FAST_BACKEND,
    ),
    LayoutCase("muon-bf16-dp2-do", 2, MUON + "--bf16", DISTRIBUTED_OPTIMIZER, "muon-bf16"),
    LayoutCase(
        "muon-moe-grouped-tp2-sp-do",
        2,
        MUON_MOE,
        f"{GROUPED_EXPERTS} {TP2_SP} {DISTRIBUTED_OPTIMIZER} {SHARED_PRODUCTS}",
        "muon-moe",
        backend=FAST_BACKEND,
    ),
    LayoutCase("muon-moe-ep2", 2, MUON_MOE, EP2, "muon-moe"),
    LayoutCase(
        "muon-mla-tp2-do",
        2,
        MUON_MLA,
        f"{TP2} {DISTRIBUTED_OPTIMIZER}",
        "muon-mla",
        backend=FAST_BACKEND,
    ),
    LayoutCase("dp2-do-overlap", 2, LLAMA, OVERLAP, "llama"),
    LayoutCase("dp2-sharded-gradients", 2, TIED, f"{COMPILED} {SHARD_GRADIENTS}", "tied"),
    LayoutCase("dp4-sharded", 4, LLAMA, SHARD_WEIGHTS, "llama", backend=FAST_BACKEND),
    LayoutCase(
        "compiled-dp2-sharded-recompute",
        2,
        LLAMA,
        f"{COMPILED} {SHARD_WEIGHTS} {FULL_RECOMPUTE} 2 {PER_TOKEN}",
        "llama",
    ),
    LayoutCase(
        "compiled-tp2-dp2-sp-sharded",
        4,
        LLAMA,
        f"{COMPILED} {TP2_SP} {SHARD_WEIGHTS}",
        "llama",
        backend=FAST_BACKEND,
    ),
    LayoutCase("pp2-dp2-vpp2-sharded", 4, LLAMA, f"{VPP2} {SHARD_WEIGHTS}", "llama"),
    LayoutCase("tied-pp2-dp2-sharded", 4, TIED, f"{PP2} {SHARD_WEIGHTS}", "tied"),
    LayoutCase("cp2-dp2-sharded", 4, LLAMA, f"{CP2} {SHARD_WEIGHTS}", "llama"),
    LayoutCase(
        "bf16-dp2-sharded-offload",
        2,
        BF16,
        f"{SHARD_WEIGHTS} {OFFLOAD} --optimizer-offload-fraction 0.5",
        "bf16",
        1e-3,
    ),
    LayoutCase("bf16-dp2-sharded-lean", 2, BF16, f"{SHARD_WEIGHTS} {LEAN_BF16}", "bf16", 1e-2),
    LayoutCase("fp16-dp2-sharded", 2, FP16, SHARD_WEIGHTS, "fp16", 1e-3),
    LayoutCase(
        "moe-grouped-ep2-dp2-sharded",
        4,
        MOE,
        f"{GROUPED_EXPERTS} --expert-model-parallel-size 2 {SHARD_WEIGHTS}",
        "moe",
    ),
    LayoutCase("dp2-do-hybrid", 2, TIED, f"{OVERLAP} {HYBRID}", "tied"),
    LayoutCase("muon-cp2-dp2-sharded-hybrid", 4, MUON, f"{CP2} {SHARD_WEIGHTS} {HYBRID}", "muon"),
    LayoutCase("cp2-dp2-sharded-hybrid", 4, LLAMA, f"{CP2} {SHARD_WEIGHTS} {HYBRID}", "llama"),
    LayoutCase("fp16-dp4-do-hybrid", 4, FP16, f"{DISTRIBUTED_OPTIMIZER} {HYBRID}", "fp16", 1e-3),
    LayoutCase(
        "tied-pp2-dp2-sharded-gradients-hybrid",
        4,
        TIED,
        f"{PP2} {SHARD_GRADIENTS} {HYBRID}",
        "tied",
    ),
    LayoutCase("tp2-dp2-do-hybrid", 4, TIED, f"{TP2_SP} {OVERLAP} {HYBRID}", "tied"),
    LayoutCase(
        "bf16-dp4-sharded-lean-hybrid",
        4,
        BF16,
        f"{SHARD_WEIGHTS} {LEAN_BF16} {HYBRID}",
        "bf16",
        1e-2,
    ),
    LayoutCase(
        "moe-grouped-ep2-dp2-sharded-hybrid",
        4,
        MOE,
        f"{GROUPED_EXPERTS} {EP2} {SHARD_WEIGHTS} {HYBRID}",
        "moe",
    ),
    LayoutCase("moe-ep2-do-hybrid", 4, MOE, f"{EP2} {OVERLAP} {HYBRID}", "moe"),
    # The values of gathered weights are those of one rank; the order of sums is not.
    LayoutCase(
        "fp8-dp2-sharded", 2, SHORT_BF16, f"{COMPILED} {SHARD_WEIGHTS} --fp8 hybrid", "fp8", 2e-3
    ),
    LayoutCase(
        "fp8-frozen-dp2-sharded",
        2,
        SHORT_BF16,
        f"{FP8_FROZEN} {SHARD_WEIGHTS}",
        "fp8-frozen",
        2e-3,
    ),
    LayoutCase(
        "fp8-rowwise-dp2-sharded",
        2,
        SHORT_BF16,
        f"{COMPILED} {SHARD_WEIGHTS} --fp8 e4m3 --fp8-recipe rowwise",
        "fp8-e4m3-rowwise",
        2e-3,
    ),
    LayoutCase(
        "fp8-blockwise-dp2-sharded-recompute",
        2,
        SHORT_BF16,
        f"{COMPILED} {SHARD_WEIGHTS} {FULL_RECOMPUTE} 2 --fp8 e4m3 --fp8-recipe blockwise",
        "fp8-blockwise",
        2e-3,
    ),
    LayoutCase(
        "fp8-tp2-dp2-sp-sharded",
        4,
        SHORT_BF16,
        f"{COMPILED} {TP2_SP} {SHARD_WEIGHTS} --fp8 hybrid",
        "fp8-tp2-sp",
        2e-3,
    ),
    LayoutCase(
        "dp2-do-cuda-graph-per-token",
        2,
        LLAMA,
        f"{DISTRIBUTED_OPTIMIZER} {CUDA_GRAPH} {PER_TOKEN}",
        "llama",
    ),
    LayoutCase("tp2", 2, LLAMA, TP2, "llama"),
    LayoutCase("tp2-sp", 2, LLAMA, TP2_SP, "llama"),
    LayoutCase(
        "tp2-sp-recompute", 2, LLAMA, f"{TP2_SP} {FULL_RECOMPUTE} 2", "llama", backend=FAST_BACKEND
    ),
    LayoutCase("pp2", 2, LLAMA, PP2, "llama"),
    LayoutCase("pp2-vpp2", 2, LLAMA, VPP2, "llama"),
    LayoutCase("pp2-recompute-auto", 2, LLAMA, f"{PP2} {AUTO_RECOMPUTE} 0.00198", "llama"),
    LayoutCase(
        "pp2-vpp2-recompute-per-stage",
        2,
        LLAMA,
        f"{VPP2} {FULL_RECOMPUTE} 1 {RECOMPUTE_GRANULARITY} 1,4,1 1,2,0,2,1 2,1,1,3,0",
        "llama",
    ),
    LayoutCase("pp2-first", 2, LLAMA, PP2 + " --decoder-first-pipeline-num-layers 1", "llama"),
    LayoutCase(
        "pp2-custom-layout", 2, LLAMA, PP2 + " --pipeline-model-parallel-layout Et|tttL", "llama"
    ),
    LayoutCase("tied-tp2", 2, TIED, TP2, "tied", backend=FAST_BACKEND),
    LayoutCase("tied-pp2-do", 2, TIED, PP2 + " " + DISTRIBUTED_OPTIMIZER, "tied"),
    LayoutCase("gpt2-tp2-sp", 2, GPT2, TP2_SP, "gpt2", backend=FAST_BACKEND),
    LayoutCase("gpt2-pp2", 2, GPT2, PP2, "gpt2"),
    LayoutCase("moe-ep2", 2, MOE, "--expert-model-parallel-size 2", "moe"),
    LayoutCase(
        "moe-tp2-etp1",
        2,
        MOE,
        TP2_SP + " --expert-tensor-parallel-size 1",
        "moe",
        backend=FAST_BACKEND,
    ),
    LayoutCase("moe-rampup-pp2", 2, MOE_RAMPUP, PP2, "moe-rampup"),
    LayoutCase("moe-aux-loss-tp2", 2, MOE_AUX_LOSS, TP2_SP, "moe-aux-loss", backend=FAST_BACKEND),
    LayoutCase(
        "all-losses-mbs2-per-token", 1, MOE_ALL_LOSSES, f"{MBS2} {PER_TOKEN}", "all-losses-mbs2"
    ),
    LayoutCase(
        "all-losses-mbs2-tp2-per-token",
        2,
        MOE_ALL_LOSSES,
        f"{MBS2} {TP2_SP} {PER_TOKEN}",
        "all-losses-mbs2",
        backend=FAST_BACKEND,
    ),
    LayoutCase("bf16-fused-loss", 1, BF16, "--cross-entropy-loss-fusion", "bf16", 1e-2),
    LayoutCase("bf16-dp2-do", 2, BF16, DISTRIBUTED_OPTIMIZER, "bf16", 1e-3),
    LayoutCase("bf16-tp2-sp", 2, BF16, TP2_SP, "bf16", 2e-2, FAST_BACKEND),
    LayoutCase("fp16", 1, FP16, "", "llama", 2e-2),
    LayoutCase("fp16-dp2-do", 2, FP16, DISTRIBUTED_OPTIMIZER, "fp16", 1e-3),
    LayoutCase("bf16-pp2", 2, BF16, PP2, "bf16", 1e-3),
    LayoutCase("tp2-dp2-sp-do-overlap", 4, LLAMA, f"{TP2_SP} {OVERLAP}", "llama"),
    LayoutCase("pp2-dp2-vpp2-do-overlap", 4, LLAMA, f"{VPP2} {OVERLAP}", "llama"),
    LayoutCase("tied-tp2-pp2-vpp2-sp", 4, TIED, f"{TP2_SP} {VPP2}", "tied"),
    LayoutCase("cp2", 2, LLAMA, CP2_GATHER, "llama"),
    LayoutCase("gpt2-cp2", 2, GPT2, CP2, "gpt2"),
    LayoutCase("moe-cp2", 2, MOE, CP2, "moe"),
    LayoutCase("cp2-tp2-sp", 4, LLAMA, f"{CP2} {TP2_SP}", "llama", backend=FAST_BACKEND),
    LayoutCase("cp2-pp2-recompute", 4, LLAMA, f"{CP2} {PP2} {FULL_RECOMPUTE} 1", "llama"),
    LayoutCase("cp2-dp2-do-overlap", 4, LLAMA, f"{CP2} {OVERLAP}", "llama"),
    LayoutCase("cp4", 4, LLAMA, "--context-parallel-size 4", "llama"),
    LayoutCase("cp4-hierarchical", 4, LLAMA, CP4_HIERARCHICAL, "llama"),
    LayoutCase("cp4-ring", 4, LLAMA, CP4_RING, "llama"),
    LayoutCase("fsccl-cp4-ring", 4, LLAMA, CP4_RING, "llama", backend=FAST_BACKEND),
    LayoutCase("compiled-cp2", 2, LLAMA, f"{COMPILED} {CP2_GATHER}", "llama"),
    LayoutCase("compiled-cp2-ring", 2, LLAMA, f"{COMPILED} {CP2_RING}", "llama"),
    # Optimized layers compute the same as megatron.core's local layers.
    LayoutCase("compiled", 1, LLAMA, COMPILED, "llama"),
    LayoutCase("compiled-tied", 1, TIED, COMPILED, "tied"),
    LayoutCase("compiled-gpt2", 1, GPT2, COMPILED, "gpt2"),
    LayoutCase("compiled-bf16", 1, BF16, COMPILED, "bf16", 1e-2),
    LayoutCase("compiled-fp16", 1, FP16, COMPILED, "llama", 2e-2),
    LayoutCase("compiled-dp2-do-overlap", 2, LLAMA, f"{COMPILED} {OVERLAP}", "llama"),
    LayoutCase("compiled-tp2", 2, LLAMA, f"{COMPILED} {TP2}", "llama", backend=FAST_BACKEND),
    LayoutCase(
        "compiled-tp2-sp-recompute",
        2,
        LLAMA,
        f"{COMPILED} {TP2_SP} {FULL_RECOMPUTE} 2",
        "llama",
        backend=FAST_BACKEND,
    ),
    LayoutCase(
        "compiled-tp2-sp-tp-overlap",
        2,
        LLAMA,
        f"{COMPILED} {TP2_SP} {TP_OVERLAP}",
        "llama",
        backend=FAST_BACKEND,
    ),
    LayoutCase(
        "compiled-tp2-dp2-sp-tp-overlap-do-overlap",
        4,
        TIED,
        f"{COMPILED} {TP2_SP} {TP_OVERLAP} {OVERLAP}",
        "tied",
        backend=FAST_BACKEND,
    ),
    LayoutCase(
        "compiled-pp2-recompute-per-stage",
        2,
        LLAMA,
        f"{COMPILED} {PP2} {FULL_RECOMPUTE} 1 {RECOMPUTE_LAYERS} 1,1,0,3,2 1,4,1",
        "llama",
    ),
    LayoutCase(
        "compiled-tied-pp2-do", 2, TIED, f"{COMPILED} {PP2} {DISTRIBUTED_OPTIMIZER}", "tied"
    ),
    LayoutCase(
        "compiled-gpt2-tp2-sp", 2, GPT2, f"{COMPILED} {TP2_SP}", "gpt2", backend=FAST_BACKEND
    ),
    LayoutCase("moe-grouped", 1, MOE, GROUPED_EXPERTS, "moe"),
    LayoutCase("moe-grouped-bf16", 1, MOE + "--bf16", GROUPED_EXPERTS, "moe", 2e-2),
    LayoutCase(
        "moe-grouped-ep2", 2, MOE, f"{GROUPED_EXPERTS} --expert-model-parallel-size 2", "moe"
    ),
    LayoutCase(
        "moe-grouped-tp2",
        2,
        MOE_AUX_LOSS,
        f"{GROUPED_EXPERTS} {TP2_SP}",
        "moe-aux-loss",
        backend=FAST_BACKEND,
    ),
    LayoutCase(
        "moe-grouped-allgather-dp2-do",
        2,
        MOE.replace("alltoall", "allgather"),
        f"{GROUPED_EXPERTS} {OVERLAP}",
        "moe",
    ),
    LayoutCase(
        "compiled-moe-grouped-ep2",
        2,
        MOE,
        f"{COMPILED} {GROUPED_EXPERTS} --expert-model-parallel-size 2 {OVERLAP}",
        "moe",
    ),
    LayoutCase("compiled-moe-ep2", 2, MOE, f"{COMPILED} --expert-model-parallel-size 2", "moe"),
    LayoutCase(
        "compiled-moe-tp2",
        2,
        MOE_AUX_LOSS,
        f"{COMPILED} {TP2_SP}",
        "moe-aux-loss",
        backend=FAST_BACKEND,
    ),
    LayoutCase(
        "compiled-tp2-dp2-sp-do-overlap", 4, LLAMA, f"{COMPILED} {TP2_SP} {OVERLAP}", "llama"
    ),
    LayoutCase(
        "compiled-pp2-dp2-vpp2-do-overlap", 4, LLAMA, f"{COMPILED} {VPP2} {OVERLAP}", "llama"
    ),
    LayoutCase("fp8", 1, SHORT_BF16, f"{COMPILED} --fp8 hybrid", "bf16-short", 3e-2),
    LayoutCase(
        "fp8-e4m3-rowwise",
        1,
        SHORT_BF16,
        f"{COMPILED} --fp8 e4m3 --fp8-recipe rowwise",
        "bf16-short",
        3e-2,
    ),
    LayoutCase(
        "fp8-blockwise",
        1,
        SHORT_BF16,
        f"{COMPILED} --fp8 e4m3 --fp8-recipe blockwise",
        "bf16-short",
        3e-2,
    ),
    LayoutCase(
        "fp8-tp2-sp",
        2,
        SHORT_BF16,
        f"{COMPILED} {TP2_SP} --fp8 hybrid",
        "bf16-short",
        3e-2,
        FAST_BACKEND,
    ),
    LayoutCase(
        "fp8-blockwise-pp2-dp2-do-overlap",
        4,
        BF16,
        f"{COMPILED} {PP2} {OVERLAP} --fp8 e4m3 --fp8-recipe blockwise --first-last-layers-bf16",
        "bf16",
        3e-2,
    ),
)

# Document masking, LoRA and fine-tuning with every attention implementation and in every layout.
MASKED_DOCUMENT_CASES = (
    LayoutCase(
        "masked-local-attention", 1, MASKED_DOCUMENTS, "--attention-backend local", "masked"
    ),
    LayoutCase(
        "masked-mbs2-recompute",
        1,
        MASKED_DOCUMENTS,
        f"{MBS2} {FULL_RECOMPUTE} 2 {PER_TOKEN}",
        "masked-per-token",
    ),
    LayoutCase("masked-dp2-do", 2, MASKED_DOCUMENTS, DISTRIBUTED_OPTIMIZER, "masked"),
    LayoutCase(
        "masked-compiled-tp2-sp",
        2,
        MASKED_DOCUMENTS,
        f"{COMPILED} {TP2_SP}",
        "masked",
        backend=FAST_BACKEND,
    ),
    LayoutCase("masked-pp2-vpp2", 2, MASKED_DOCUMENTS, VPP2, "masked"),
    LayoutCase("masked-cp2", 2, MASKED_DOCUMENTS, CP2_GATHER, "masked"),
    LayoutCase("masked-cp4-hierarchical", 4, MASKED_DOCUMENTS, CP4_HIERARCHICAL, "masked"),
    LayoutCase("lora-recompute-mbs2", 1, LORA, f"{MBS2} {FULL_RECOMPUTE} 2", "lora"),
    LayoutCase("lora-tp2", 2, LORA, TP2, "lora", backend=FAST_BACKEND),
    LayoutCase(
        "lora-some-layers-tp2-sp-do",
        2,
        LORA_SOME_LAYERS,
        f"{TP2_SP} {DISTRIBUTED_OPTIMIZER}",
        "lora-some-layers",
        backend=FAST_BACKEND,
    ),
    LayoutCase(
        "lora-compiled-tp2-sp-tp-overlap",
        2,
        LORA,
        f"{COMPILED} {TP2_SP} {TP_OVERLAP}",
        "lora",
        backend=FAST_BACKEND,
    ),
    LayoutCase(
        "lora-compiled-tp2-sp-recompute",
        2,
        LORA,
        f"{COMPILED} {TP2_SP} {FULL_RECOMPUTE} 1",
        "lora",
        backend=FAST_BACKEND,
    ),
    LayoutCase("lora-pp2-vpp2-do-overlap", 2, LORA, f"{VPP2} {OVERLAP}", "lora"),
    LayoutCase("lora-dp2-lean", 2, LORA, LEAN_MOMENTS, "lora", 1e-2),
    LayoutCase(
        "lora-some-layers-compiled-pp2-dp2-do-overlap",
        4,
        LORA_SOME_LAYERS,
        f"{COMPILED} {PP2} {OVERLAP}",
        "lora-some-layers",
    ),
    LayoutCase("sft-dp2-do-overlap", 2, SFT, OVERLAP, "sft"),
    LayoutCase(
        "lora-compiled-dp2-sharded-recompute",
        2,
        LORA,
        f"{COMPILED} {SHARD_WEIGHTS} {FULL_RECOMPUTE} 1",
        "lora",
    ),
    LayoutCase("sft-cp2-pp2-vpp2", 4, SFT, f"{CP2} {VPP2}", "sft"),
    LayoutCase(
        "masked-learned-positions-pp2",
        2,
        MASKED_DOCUMENTS,
        f"--position-embedding-type learned_absolute {PP2}",
        "masked-learned-positions",
    ),
)


MTP_CASES = (
    LayoutCase(
        "mtp-compiled-tp2-sp-recompute",
        2,
        MTP,
        f"{COMPILED} {TP2_SP} {FULL_RECOMPUTE} 2",
        "mtp",
        backend=FAST_BACKEND,
    ),
    LayoutCase("mtp-pp2-vpp2-do-overlap", 2, MTP, f"{VPP2} {OVERLAP}", "mtp"),
    LayoutCase("mtp-lora-pp2-do", 2, MTP_LORA, f"{PP2} {DISTRIBUTED_OPTIMIZER}", "mtp-lora"),
    LayoutCase("mtp-lora-tp2-sp", 2, MTP_LORA, TP2_SP, "mtp-lora", backend=FAST_BACKEND),
    LayoutCase("mtp-cp2-per-token", 2, MTP, f"{CP2} {PER_TOKEN}", "mtp-per-token"),
    LayoutCase("mtp-dp2-sharded", 2, MTP, SHARD_WEIGHTS, "mtp"),
    LayoutCase("mtp-cp2-do", 2, MTP, f"{CP2} {DISTRIBUTED_OPTIMIZER}", "mtp"),
    LayoutCase(
        "mtp-tied-compiled-pp2-custom-layout",
        2,
        MTP_TIED,
        f"{COMPILED} {PP2} --pipeline-model-parallel-layout Ettt|tmL",
        "mtp-tied",
    ),
    LayoutCase(
        "mtp-moe-grouped-pp2-ep2-do",
        4,
        MTP_MOE,
        f"{GROUPED_EXPERTS} {PP2} {EP2} {DISTRIBUTED_OPTIMIZER}",
        "mtp-moe",
        backend=FAST_BACKEND,
    ),
)


# Other model families and kinds of layers in every layout.
FAMILY_CASES = (
    LayoutCase("bert-compiled", 1, BERT, COMPILED, "bert"),
    LayoutCase("bert-dp2-do-overlap", 2, BERT, OVERLAP, "bert"),
    LayoutCase(
        "bert-tp2-sp-do", 2, BERT, f"{TP2_SP} {DISTRIBUTED_OPTIMIZER}", "bert", backend=FAST_BACKEND
    ),
    LayoutCase(
        "bert-compiled-tp2-sp", 2, BERT, f"{COMPILED} {TP2_SP}", "bert", backend=FAST_BACKEND
    ),
    LayoutCase("bert-pp2-vpp2-do-overlap", 2, BERT, f"{VPP2} {OVERLAP}", "bert"),
    LayoutCase(
        "bert-bf16-tp2-sp", 2, BERT + "--bf16", TP2_SP, "bert-bf16", 1e-2, backend=FAST_BACKEND
    ),
    LayoutCase(
        "bert-rotary-tp2-pp2-sp",
        4,
        ROTARY_BERT,
        f"{TP2_SP} {PP2}",
        "bert-rotary",
        backend=FAST_BACKEND,
    ),
    LayoutCase(
        "bert-rotary-compiled-cp2-dp2",
        4,
        ROTARY_BERT,
        f"{COMPILED} {CP2} {DISTRIBUTED_OPTIMIZER}",
        "bert-rotary",
    ),
    LayoutCase(
        "bert-moe-ep2", 2, ROTARY_BERT + BERT_MOE, "--expert-model-parallel-size 2", "bert-moe"
    ),
    LayoutCase(
        "bert-mesh-tp2+dp2-sp-do",
        4,
        BERT,
        mesh_options(TP2_DP2, "3 1", f"{MBS2} {DISTRIBUTED_OPTIMIZER} --sequence-parallel"),
        "bert",
    ),
    LayoutCase("bert-replicas-1x1+1x3", 2, BERT, replica_options("1 1 1 3"), "bert"),
    LayoutCase(
        "gemma-compiled-tp2-sp-do",
        2,
        GEMMA,
        f"{COMPILED} {TP2_SP} {DISTRIBUTED_OPTIMIZER}",
        "gemma",
        backend=FAST_BACKEND,
    ),
    LayoutCase(
        "gemma-mesh-tp2+dp2-sp-do",
        4,
        GEMMA,
        mesh_options(TP2_DP2, "3 1", f"{MBS2} {DISTRIBUTED_OPTIMIZER} --sequence-parallel"),
        "gemma",
        backend=FAST_BACKEND,
    ),
    LayoutCase("gemma-pp2-recompute-full", 2, GEMMA, f"{PP2} {FULL_RECOMPUTE} 1", "gemma"),
    LayoutCase(
        "gemma-masked-compiled-tp2-sp",
        2,
        GEMMA_MASKED_DOCUMENTS,
        f"{COMPILED} {TP2_SP}",
        "gemma-masked",
    ),
    LayoutCase("gemma-masked-cp2", 2, GEMMA_MASKED_DOCUMENTS, CP2, "gemma-masked"),
    LayoutCase("gemma-masked-cp2-gather", 2, GEMMA_MASKED_DOCUMENTS, CP2_GATHER, "gemma-masked"),
    LayoutCase("gemma-cp4-gather", 4, GEMMA, CP4_RING, "gemma", backend=FAST_BACKEND),
    LayoutCase("gemma-compiled-cp2-gather", 2, GEMMA, f"{COMPILED} {CP2_GATHER}", "gemma"),
    LayoutCase("mla-masked-cp2", 2, MLA_MASKED_DOCUMENTS, CP2, "mla-masked"),
    LayoutCase("mla-tp2", 2, MLA, TP2, "mla", backend=FAST_BACKEND),
    LayoutCase(
        "mla-fp8-blockwise-tp2-sp-recompute",
        2,
        MLA_BF16,
        f"{COMPILED} {TP2_SP} {FULL_RECOMPUTE} 2 --fp8 e4m3 --fp8-recipe blockwise",
        "mla-bf16",
        3e-2,
        FAST_BACKEND,
    ),
    LayoutCase("mla-cp2", 2, MLA, CP2_GATHER, "mla", backend=FAST_BACKEND),
    LayoutCase("mla-cp2-ring", 2, MLA, CP2_RING, "mla", backend=FAST_BACKEND),
    LayoutCase(
        "mla-lora-compiled-tp2",
        2,
        MLA_LORA,
        f"{COMPILED} {TP2}",
        "mla-lora",
        backend=FAST_BACKEND,
    ),
    LayoutCase(
        "mla-moe-lora-tp2-sp-ep2-do",
        2,
        MLA_MOE_LORA,
        f"{TP2_SP} {DISTRIBUTED_OPTIMIZER} {EP2} --expert-tensor-parallel-size 1",
        "mla-moe-lora",
        backend=FAST_BACKEND,
    ),
    LayoutCase(
        "mla-moe-lora-experts-compiled-tp2-sp-etp2-do",
        2,
        MLA_MOE_LORA_EXPERTS,
        f"{COMPILED} {TP2_SP} {DISTRIBUTED_OPTIMIZER}",
        "mla-moe-lora-experts",
        backend=FAST_BACKEND,
    ),
    LayoutCase(
        "mla-moe-lora-experts-tp2-sp-ep2",
        2,
        MLA_MOE_LORA_EXPERTS,
        f"{TP2_SP} {EP2} --expert-tensor-parallel-size 1",
        "mla-moe-lora-experts",
        backend=FAST_BACKEND,
    ),
    LayoutCase("moe-lora-ep2", 2, MOE_LORA, EP2, "moe-lora"),
    LayoutCase("moe-lora-grouped", 1, MOE_LORA, GROUPED_EXPERTS, "moe-lora"),
    LayoutCase("moe-lora-grouped-bf16", 1, MOE_LORA + " --bf16", GROUPED_EXPERTS, "moe-lora", 2e-2),
    LayoutCase(
        "mla-moe-lora-experts-compiled-grouped-tp2-sp-etp2-do",
        2,
        MLA_MOE_LORA_EXPERTS,
        f"{COMPILED} {GROUPED_EXPERTS} {TP2_SP} {DISTRIBUTED_OPTIMIZER}",
        "mla-moe-lora-experts",
        backend=FAST_BACKEND,
    ),
    LayoutCase(
        "moe-lora-grouped-ep2-do-recompute",
        2,
        MOE_LORA,
        f"{GROUPED_EXPERTS} {EP2} {OVERLAP} {FULL_RECOMPUTE} 2",
        "moe-lora",
    ),
    LayoutCase("moe-lora-tp2-sp-etp2", 2, MOE_LORA, TP2_SP, "moe-lora", backend=FAST_BACKEND),
    LayoutCase(
        "mla-moe-compiled-tp2-sp-ep2-do",
        2,
        MLA_MOE,
        f"{COMPILED} {TP2_SP} {DISTRIBUTED_OPTIMIZER} {EP2} --expert-tensor-parallel-size 1",
        "mla-moe",
        backend=FAST_BACKEND,
    ),
    LayoutCase(
        "mla-moe-mesh-ep2+ep2-do",
        4,
        MLA_MOE,
        mesh_options("1 1 2 2 1  1 1 2 2 1", "3 1", DISTRIBUTED_OPTIMIZER),
        "mla-moe",
        backend=FAST_BACKEND,
    ),
    LayoutCase("mla-moe-pp2-ep2", 4, MLA_MOE, f"{PP2} {EP2}", "mla-moe", backend=FAST_BACKEND),
)

EXAMPLES = (
    *("deepseek/tiny", "deepseek/tiny_v2", "gemma/tiny", "gemma/tiny_2", "gpt2/tiny"),
    *("llama3/tiny_3.2", "mistral/tiny", "mistral/tiny_dense", "qwen2.5/tiny"),
    *("qwen3/tiny_pretraining", "qwen3/tiny_moe"),
)
"""Examples whose small model trains for a few steps on mock data: directory and configuration."""


def create_example_case(name: str) -> LayoutCase:
    """Return the case of an example's small model."""
    directory, config_name = name.split("/")
    conf = ROOT / "examples" / directory / "conf"
    train = load(conf, "train", [f"train={config_name}", "action=dryrun"]).experiment.train
    entries = [entry for entry in train.entries if not entry.key.startswith("train.data.")]
    arguments = command_line(TrainArguments(tuple(entries)))
    arguments += flatten({"mock_data": True, "vocab_size": 1000})
    overrides = "--train-iters 3 --eval-iters 1 --lr-warmup-iters 0 --seq-length 64"
    return LayoutCase(f"example-{name}", 1, " ".join(arguments), overrides, "")


# Tolerances of layouts that together use every collective of megatron.core and are also trained on
# fsccl. The sum of two numbers does not depend on the order, so results of two ranks are equal.
# With four ranks fsccl may add in another order than gloo.
FSCCL_TOLERANCES = {
    **dict.fromkeys(("dp2-do-overlap", "tp2-sp", "pp2-vpp2", "tied-pp2-do", "moe-ep2"), 0.0),
    "tp2-dp2-sp-do-overlap": 1e-6,
}
FSCCL_CASES = tuple(
    replace(
        case,
        name=f"{case.name}-fsccl",
        reference=case.name,
        tolerance=FSCCL_TOLERANCES[case.name],
        backend="fsccl",
        clusters="2,2" if case.world_size == 4 else "",
    )
    for case in HOMOGENEOUS_CASES
    if case.name in FSCCL_TOLERANCES
)


# Compiled collectives of layers, forward and backward, are the same for every device. Gradient
# accumulation in place is not: with several micro-batches in flight, this compiler backend treats
# the accumulators as modified.
GRAPH_CASES = tuple(
    replace(case, name=f"{case.name}-graphs", graphs=True)
    for case in HOMOGENEOUS_CASES
    if case.name
    in (
        "compiled-cp2",
        "compiled-tp2-sp-recompute",
        "compiled-tp2-sp-selective",
        "compiled-tp2-sp-tp-overlap",
        "compiled-cp2-selective",
        "compiled-mla-moe-selective",
        "compiled-moe-tp2",
        "compiled-offload-layers",
    )
)

ALWAYS_TRAINED = frozenset({
    "tp2-dp2-sp-do-overlap", "cp2-tp2-sp", "mla-moe-pp2-ep2", "mesh-tp2+dp2", "mesh-bf16",
    "mesh-vpp2-tied-do-overlap", "mesh-moe-dp2+tp2-ep2-do", "mesh-fp16-overflow-on-last-stage",
    "mesh-recompute-per-stage", "replicas-pp2-1x2+2x1-do", "mesh-dp2+tp2-mtp-tied-sp-do",
    "compiled-tp2-dp2-sp-sharded", "muon-tp2-dp2-sp-sharded", "cp2-dp2-sharded-hybrid",
})  # fmt: skip
"""Layouts of four and more ranks that are always trained. The others are slow tests, because they
rarely find additional errors.
"""


RARELY_TRAINED = frozenset({
    "recompute-full", "dp2", "dp2-do", "tp2", "pp2-first", "tied-tp2", "gpt2-pp2", "gpt2-cp2",
    "moe-cp2", "all-losses-mbs2-per-token", "bf16-tp2-sp", "bf16-pp2", "fp16", "compiled-gpt2",
    "compiled-fp16", "compiled-tp2", "compiled-moe-ep2", "compiled-moe-tp2",
    "compiled-gpt2-tp2-sp", "moe-grouped-bf16", "moe-grouped-tp2", "fp8-e4m3-rowwise",
    "fp16-dp2-sharded", "fp8-dp2-sharded", "fp8-frozen-dp2-sharded", "fp8-rowwise-dp2-sharded",
    "masked-dp2-do", "mtp-cp2-per-token", "pp2-vpp2",
    "mla-moe-lora-experts-compiled-grouped-tp2-sp-etp2-do", "muon-tp2", "muon-moe-ep2",
    "muon-mla-tp2-do", "fp8", "lora-tp2", "lora-compiled-tp2-sp-recompute", "moe-lora-ep2",
    "mla-moe-lora-tp2-sp-ep2-do", "compiled-tied", "compiled-bf16", "compiled-bf16-lean",
    "compiled-offload-layers", "compiled-dp2-sharded-recompute", "compiled-tp2-sp-selective",
    "compiled-cp2", "compiled-dp2-do-overlap", "gemma-compiled-tp2-sp-do", "bert-compiled",
    "bert-bf16-tp2-sp", "bert-tp2-sp-do", "bert-dp2-do-overlap", "mla-cp2", "mla-tp2",
    "mla-lora-compiled-tp2", "mla-moe-compiled-tp2-sp-ep2-do", "moe-grouped", "moe-ep2",
    "moe-lora-grouped", "moe-lora-grouped-bf16", "lion-tp2", "lion-moe-ep2", "lora-selective",
    "lora-recompute-mbs2", "gpt2-tp2-sp", "offload-layers", "lean", "fp16-offload", "bf16-dp2-do",
    "fp16-dp2-do", "dp2-do-overlap", "cp2", "pp2", "tp2-sp", "replicas-1x1+1x3", "replicas-three",
    "mtp-lora-pp2-do", "mtp-cp2-do", "mtp-dp2-sharded", "mesh-1+1+1-eager", "mesh-auto-all-losses",
})  # fmt: skip
"""Smaller layouts whose features are covered by other layouts. They are slow tests as well."""


def is_slow(case: LayoutCase) -> bool:
    """Return whether the tests of a case are marked slow."""
    is_large = case.world_size > 3 and case.name not in ALWAYS_TRAINED
    return is_large or case.name in RARELY_TRAINED or case in (*FSCCL_CASES, *GRAPH_CASES)
