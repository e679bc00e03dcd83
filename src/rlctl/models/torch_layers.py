"""Megatron's layer spec in plain torch: the same math and checkpoint keys as the Transformer Engine spec.

Shapes: T tokens of a packed stream on this rank, C context-parallel ranks, H heads, G key-value groups, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch.nn.attention.bias import causal_lower_right

from rlctl.parallel import zigzag


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm whose gradient Megatron reduces over tensor-parallel ranks when they hold different tokens."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class _Gather(torch.autograd.Function):
    """All-gather along dim 0; the gradient is reduce-scattered."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        out = x.new_empty(group.size() * x.size(0), *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grads[0]
        out = grad.new_empty(grad.size(0) // ctx.group.size(), *grad.shape[1:])
        dist.reduce_scatter_tensor(out, grad.contiguous(), group=ctx.group)
        return out, None


class PackedAttention(torch.nn.Module):
    """Causal attention within each sequence of a packed stream; context parallelism by gathering keys and values.

    One torch SDPA call a sequence (two with context parallelism), so no [T, T] mask is ever made.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.scale, self.cp = softmax_scale, pg_collection.cp

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: [T, H, D].
            key: [T, G, D].
            value: [T, G, D].
            attention_mask: unused; attention is causal.
            packed_seq_params: `cu_seqlens_q_padded` or `cu_seqlens_q`, the sequences' boundaries in the whole stream.

        Returns:
            [T, H * D].
        """
        params = packed_seq_params
        boundaries = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
        lengths = boundaries.diff().tolist()
        size, rank = self.cp.size(), self.cp.rank()
        if size > 1:
            key, value = self._gather(key, value, lengths)
        outputs, q_start, k_start = [], 0, 0
        for n in lengths:
            chunk = n // (2 * size) if size > 1 else n
            for part in (rank, 2 * size - 1 - rank) if size > 1 else (0,):
                q = query[q_start : q_start + chunk]
                end = k_start + (part + 1) * chunk
                outputs.append(self._attend(q, key[k_start:end], value[k_start:end]))
                q_start += chunk
            k_start += n
        return torch.cat(outputs).flatten(1)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[t, H, D] queries, the last t positions of [s, G, D] keys and values -> [t, H, D]."""
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        full = q.size(2) == k.size(2)
        bias = None if full else causal_lower_right(q.size(2), k.size(2))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, is_causal=full, scale=self.scale, enable_gqa=q.size(1) != k.size(1)
        )
        return out.squeeze(0).transpose(0, 1)

    def _gather(
        self, key: torch.Tensor, value: torch.Tensor, lengths: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All ranks' keys and values, in stream order."""
        size = self.cp.size()
        held = torch.cat([zigzag(lengths, r, size) for r in range(size)]).to(key.device)
        order = torch.empty_like(held)
        order[held] = torch.arange(len(held), device=key.device)
        both = _Gather.apply(torch.cat([key, value], -1), self.cp)[order]
        return both.split([key.size(-1), value.size(-1)], -1)


class TorchSpecProvider(LocalSpecProvider):
    """Megatron's backend choice for plain torch: own norm and attention, its own linears and experts."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        """RMSNorm."""
        return RMSNorm

    def core_attention(self) -> type:
        """PackedAttention."""
        return PackedAttention


def torch_block_spec(config: Any, num_layers: int) -> TransformerBlockSubmodules:
    """The spec of `num_layers` layers on this rank, and the final norm.

    Norm weights are saved under the names that the Transformer Engine spec gives them, where it fuses them into the
    linear that follows (megatron/core/models/gpt/gpt_layer_specs.py); with experts it does not fuse the second one.
    """
    provider = TorchSpecProvider()
    head_norm = RMSNorm if config.qk_layernorm else IdentityOp
    keys = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    if not config.num_moe_experts:
        keys["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=provider.column_parallel_linear(),
                    core_attention=provider.core_attention(),
                    linear_proj=provider.row_parallel_linear(),
                    q_layernorm=head_norm,
                    k_layernorm=head_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=get_mlp_module_spec_for_backend(provider, num_experts=config.num_moe_experts),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=keys,
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RMSNorm)
