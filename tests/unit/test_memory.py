"""Bytes on each GPU: against arithmetic by hand, published counts, and the tensors that a real model keeps."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rlctl.errors import RlctlError
from rlctl.models.resolve import catalogue, resolve
from rlctl.parallel import Layout
from rlctl.plan.hardware import gpu_memory_bytes
from rlctl.plan.memory import UNMODELLED_BYTES, estimate, parameters_of_stage

LLAMA_8B, QWEN_MOE, TIED = (resolve(n).config for n in ("llama-3.1-8b", "qwen3-30b-a3b", "qwen3-0.6b"))
PARAMETERS_8B = 8_030_261_248
TOKENS = 448
SETTINGS = {
    "precision": "bfloat16", "backend": "megatron", "max_tokens_per_microbatch": 4096,
    "activation_checkpointing": False, "reference": False,
}  # fmt: skip


def test_pipeline_stages_add_up_to_the_published_count():
    layout = Layout(world=4, pp=4)
    stages = [parameters_of_stage(LLAMA_8B, layout, s) for s in range(4)]
    assert sum(stages) == PARAMETERS_8B
    assert stages[1] == stages[2] == stages[0] - 128256 * 4096


def test_a_tied_embedding_is_on_the_first_and_the_last_stage():
    layout = Layout(world=2, pp=2)
    total = sum(parameters_of_stage(TIED, layout, s) for s in range(2))
    assert total == 596_049_920 + 151936 * 1024
    assert parameters_of_stage(TIED, Layout(world=1), 0) == 596_049_920


def test_tensor_parallelism_divides_all_but_the_norms():
    norms = (2 * 32 + 1) * 4096
    assert parameters_of_stage(LLAMA_8B, Layout(world=4, tp=4), 0) == (PARAMETERS_8B - norms) // 4 + norms


def test_a_vocabulary_that_does_not_divide_is_padded():
    config = LLAMA_8B | {"vocab_size": 128257}
    wide = parameters_of_stage(config, Layout(world=4, tp=4), 0)
    assert wide - parameters_of_stage(LLAMA_8B, Layout(world=4, tp=4), 0) == 2 * 4096


def test_expert_parallelism_divides_the_experts_alone():
    experts = 48 * 128 * 3 * 768 * 2048
    whole = 30_532_122_624
    assert parameters_of_stage(QWEN_MOE, Layout(world=8, ep=8), 0) == whole - experts + experts // 8
    assert parameters_of_stage(QWEN_MOE, Layout(world=8, tp=2, ep=4, etp=2), 0) < whole // 2


def test_mixed_precision_adam_takes_18_bytes_a_parameter_and_12_of_them_are_sharded():
    alone = estimate(LLAMA_8B, Layout(world=1), **SETTINGS)
    assert alone.weights + alone.gradients + alone.main_weights + alone.optimizer == 18 * PARAMETERS_8B
    sharded = estimate(LLAMA_8B, Layout(world=8, cp=2), **SETTINGS)
    assert (sharded.weights, sharded.gradients) == (alone.weights, alone.gradients)
    assert sharded.main_weights + sharded.optimizer == 12 * PARAMETERS_8B // 8
    full = estimate(LLAMA_8B, Layout(world=1), **(SETTINGS | {"precision": "float32"}))
    assert full.main_weights == 0
    assert full.weights + full.gradients + full.optimizer == 16 * PARAMETERS_8B


def test_experts_shard_their_optimizer_over_their_own_replicas():
    memory = estimate(QWEN_MOE, Layout(world=16, ep=8), **SETTINGS)
    experts = 48 * 128 * 3 * 768 * 2048
    dense = 30_532_122_624 - experts
    assert memory.main_weights + memory.optimizer == 12 * (dense // 16 + experts // 8 // 2)


def test_fsdp_shards_16_bytes_a_parameter():
    memory = estimate(LLAMA_8B, Layout(world=8), **(SETTINGS | {"backend": "dtensor"}))
    assert memory.weights + memory.gradients + memory.optimizer == 16 * PARAMETERS_8B // 8
    assert memory.gathered > 2 * 2 * 128256 * 4096, "at least the bfloat16 embedding and output layer are unsharded"


def test_the_parts_add_up_and_training_and_generation_must_each_fit():
    memory = estimate(LLAMA_8B, Layout(world=8, tp=2, sp=True), **(SETTINGS | {"reference": True}))
    kept = memory.weights + memory.gradients + memory.main_weights + UNMODELLED_BYTES
    assert memory.training == kept + memory.optimizer + memory.gathered + memory.activations + memory.logits
    assert memory.generating(80e9, utilization=0.5) == kept + 40_000_000_000
    assert memory.fits(80e9, utilization=0.5)
    assert not memory.fits(memory.training - 1, utilization=0.3)
    assert not memory.fits(80e9, utilization=0.7), "the policy keeps 28 GB while the engine is awake"
    assert not memory.fits(80e9, utilization=0.2), "the engine's weights alone are 16 GB"


def test_a_reference_is_a_copy_of_the_weights_on_the_host():
    with_reference = estimate(LLAMA_8B, Layout(world=8, tp=2, sp=True), **(SETTINGS | {"reference": True}))
    without = estimate(LLAMA_8B, Layout(world=8, tp=2, sp=True), **SETTINGS)
    assert (with_reference.reference, without.reference) == (with_reference.weights, 0)
    assert with_reference.training == without.training


def test_the_engine_cache_is_what_its_share_leaves():
    memory = estimate(LLAMA_8B, Layout(world=8), **(SETTINGS | {"generation_tp": 2}))
    per_token = 2 * 32 * 4 * 128 * 2  # key and value, layers, half of 8 groups, head size, bytes
    assert memory.kv_bytes_per_token == per_token
    assert memory.cache_tokens(80e9, utilization=0.5) == int((40e9 - PARAMETERS_8B) // per_token)


@pytest.mark.parametrize("name", ["llama-3.1-70b", "qwen3-30b-a3b"])
def test_activations_shrink_with_recompute_sequence_and_context_parallelism(name):
    config = resolve(name).config

    def activations(recompute: bool = False, **degrees):
        settings = SETTINGS | {"activation_checkpointing": recompute, "max_tokens_per_microbatch": 16384}
        return estimate(config, Layout(world=64, **degrees), **settings).activations

    assert activations() > activations(tp=4) > activations(tp=4, sp=True) > activations(tp=4, sp=True, cp=2)
    assert activations(recompute=True) < activations() / 5


def test_gpus_have_the_memory_of_their_data_sheets():
    assert gpu_memory_bytes("H100") == 80_000_000_000
    with pytest.raises(RlctlError, match="unknown GPU `h10`") as caught:
        gpu_memory_bytes("h10")
    assert "`h100`" in caught.value.hint


def test_the_estimate_of_every_catalogue_model_loads_no_torch():
    code = (
        "import sys; from rlctl.parallel import Layout; from rlctl.plan.memory import estimate;"
        "from rlctl.models.resolve import resolve;"
        f"[estimate(resolve(n).config, Layout(world=1), **{SETTINGS!r}) for n in {sorted(catalogue())!r}];"
        "assert not {'torch', 'transformers', 'megatron', 'vllm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_fullest_stage_is_reported():
    memory = estimate(LLAMA_8B, Layout(world=4, pp=4), **SETTINGS)
    assert memory.stage == 0
    heavy_logits = estimate(
        resolve("qwen3-0.6b").config, Layout(world=2, pp=2),
        **(SETTINGS | {"max_tokens_per_microbatch": 65536, "activation_checkpointing": True}),
    )  # fmt: skip
    assert heavy_logits.stage == 1


KEPT_CASES = (  # model, degrees, recompute
    ("llama", {}, False),
    ("llama", {}, True),
    ("qwen3", {}, False),
    ("qwen3_moe", {}, False),
    ("llama", {"tp": 2, "sp": True}, False),
    ("llama", {"tp": 2}, False),
    ("qwen3", {"cp": 2}, False),
    ("llama", {"cp": 2}, False),
)


def kept_elements(case, layers):
    """Elements that Megatron's layers keep for backward on this rank, parameters aside."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from rlctl.models.build import build_model
    from tests import tiny

    kind, degrees, recompute = case
    layout = Layout(world=2, **degrees)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        layout.tp, context_parallel_size=layout.cp, create_gloo_process_groups=False
    )  # fmt: skip
    model_parallel_cuda_manual_seed(0, force_reset_rng=True)
    config = tiny.config(kind, num_hidden_layers=layers).to_dict()
    model = build_model(config, layout, precision="float32", activation_checkpointing=recompute)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    # Short sequences: with context parallelism the host's attention keeps a mask of half a sequence length per token.
    edges = torch.arange(0, TOKENS + 1, 16, dtype=torch.int32)
    packs = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=edges, cu_seqlens_kv=edges, max_seqlen_q=16, max_seqlen_kv=16
    )  # fmt: skip
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = tensor, storage.nbytes() // 4  # held, so that no address is used twice
        return tensor

    tokens = torch.arange(TOKENS // layout.cp)[None]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        model(
            input_ids=tokens % 256, position_ids=tokens, attention_mask=None, packed_seq_params=packs,
            output_processor=lambda *, hidden_states, **_: hidden_states,
        )  # fmt: skip
    return sum(size for _, size in kept.values())


def kept_by_two_more_layers():
    return [kept_elements(case, 4) - kept_elements(case, 2) for case in KEPT_CASES]


@pytest.mark.slow
def test_a_layer_keeps_the_tensors_that_the_estimate_counts():
    """Megatron's own modules on two processes: what autograd saves for two more layers, against the estimate."""
    from tests import distributed, tiny

    settings = SETTINGS | {"precision": "float32", "max_tokens_per_microbatch": TOKENS}
    measured = distributed.run("tests.unit.test_memory:kept_by_two_more_layers", 2)[0]
    for (kind, degrees, recompute), found in zip(KEPT_CASES, measured, strict=True):

        def estimated(layers, kind=kind, degrees=degrees, recompute=recompute):
            config = tiny.config(kind, num_hidden_layers=layers).to_dict()
            options = settings | {"activation_checkpointing": recompute}
            return estimate(config, Layout(world=2, **degrees), **options).activations // 4

        assert found == pytest.approx(estimated(4) - estimated(2), rel=0.03), (kind, degrees, recompute)
