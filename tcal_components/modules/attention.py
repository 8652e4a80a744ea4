"""Softmax attention of the teachers and of a hybrid's retained layers."""

from __future__ import annotations

import torch
from torch import nn
from torchtune.modules import KVCache, MultiHeadAttention
from torchtune.modules.attention_utils import _MaskType


class KeyValueCache(KVCache):
    """torchtune's key/value cache, which never makes the host wait for the GPU.

    torchtune 0.6.1 compares a tensor on the device with the cache's length in every update, so every layer of every
    decoding step waits for the one before. Here a token too many is an index error of PyTorch.
    """

    def update(self, k_val: torch.Tensor, v_val: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends keys and values.

        Args:
            k_val: Keys [B, H_kv, T, D].
            v_val: Values [B, H_kv, T, D].

        Returns:
            tuple[torch.Tensor, torch.Tensor]: All places for keys and for values, [B, H_kv, S, D].

        Raises:
            ValueError: If the batch is larger than the cache's.
        """
        if k_val.shape[0] > self.k_cache.shape[0]:
            raise ValueError(f"batch of {k_val.shape[0]} rows; the cache was set up for {self.k_cache.shape[0]}")
        length = k_val.shape[2]
        places = self.cache_pos[:length]
        self.k_cache[:, :, places] = k_val
        self.v_cache[:, :, places] = v_val
        self.cache_pos.add_(length)
        return self.k_cache, self.v_cache


class GroupedQueryAttention(MultiHeadAttention):
    """torchtune's attention with q/k norm before RoPE and with a head size of its own.

    torchtune 0.6.1 normalises q and k after RoPE; Qwen3 does it before. A subclass, so that torchtune's tensor
    parallelism and adapters still recognise it. ``_attention_call(q, k, v, mask=, dropout_p=, is_causal=)`` gets
    q, k, v [B, H, T, D] after bias, norm and RoPE with key/value heads repeated, and returns the context [B, H, T, D];
    calibration wraps that attribute.

    Args:
        embed_dim: Hidden size E.
        num_heads: Query heads H.
        num_kv_heads: Key/value heads; divides H.
        head_dim: Head size D.
        q_proj: E -> H * D.
        k_proj: E -> num_kv_heads * D.
        v_proj: E -> num_kv_heads * D.
        output_proj: H * D -> E.
        pos_embeddings: RoPE on [B, T, heads, D].
        q_norm: RMSNorm over D for q. Default: None.
        k_norm: RMSNorm over D for k; together with ``q_norm``. Default: None.
        max_seq_len: Longest sequence. Default: 4096.
    """

    def __init__(
        self,
        *,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        q_proj: nn.Module,
        k_proj: nn.Module,
        v_proj: nn.Module,
        output_proj: nn.Module,
        pos_embeddings: nn.Module,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        max_seq_len: int = 4096,
    ) -> None:
        super().__init__(
            # torchtune insists that num_heads divides embed_dim; it uses neither number afterwards.
            embed_dim=num_heads * head_dim,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            q_proj=q_proj,
            k_proj=k_proj,
            v_proj=v_proj,
            output_proj=output_proj,
            pos_embeddings=pos_embeddings,
            q_norm=q_norm,
            k_norm=k_norm,
            max_seq_len=max_seq_len,
        )
        self.embed_dim = embed_dim
        self.kv_cache: KeyValueCache | None = None

    def setup_cache(self, batch_size: int, dtype: torch.dtype, max_seq_len: int) -> None:
        """Makes the cache for decoding; a cache that exists is kept.

        Args:
            batch_size: Largest batch.
            dtype: Type of keys and values.
            max_seq_len: Longest prompt plus answer.
        """
        if self.kv_cache is not None:
            super().setup_cache(batch_size, dtype, max_seq_len)  # says so
        else:
            self.kv_cache = KeyValueCache(
                batch_size=batch_size,
                max_seq_len=max_seq_len,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                dtype=dtype,
            )
            self.cache_enabled = True

    def forward(
        self,
        x: torch.Tensor,
        y: torch.Tensor | None = None,
        *,
        mask: _MaskType | None = None,
        input_pos: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attends from ``x`` to ``y``.

        Args:
            x: Queries' input [B, T, E].
            y: Keys' and values' input [B, S, E]; for self-attention the same as ``x``. None reads the cache only.
            mask: Boolean [B, T, S] (True means may attend) or a BlockMask; None means causal, with a cache from its first
                place (a prompt). With a cache, its first S places are read; a mask that is one value expanded over S
                (stride 0) masks none of them.
            input_pos: Positions [B, T] or [T]; None means 0 to T - 1.

        Returns:
            torch.Tensor: Output [B, T, E].

        Raises:
            ValueError: If ``y`` is None without an enabled cache.
        """
        batch, length, _ = x.shape
        cache = self.kv_cache if self.cache_enabled else None
        q = self._heads(self.q_proj(x), self.q_norm, input_pos)
        if y is not None:
            k = self._heads(self.k_proj(y), self.k_norm, input_pos)
            v = self.v_proj(y).view(batch, y.shape[1], -1, self.head_dim).transpose(1, 2)
            if cache is not None:
                k, v = cache.update(k, v)
        elif cache is not None:
            k, v = cache.k_cache, cache.v_cache
        else:
            raise ValueError("attention got no y and has no enabled key/value cache to read instead")

        repeats = self.num_heads // self.num_kv_heads
        if cache is not None and isinstance(mask, torch.Tensor):
            # Decoding reads the cache in every step: repeating its heads would multiply that. With a mask, PyTorch's
            # CUDA kernels do repeat them (and widen bf16); without one they do not.
            places = mask.shape[-1]
            masked = mask.stride(-1) != 0
            # At one token, the query heads of a key/value head can stand as queries of it: nothing is repeated then.
            folded = masked and length == 1
            context = nn.functional.scaled_dot_product_attention(
                q.reshape(batch, -1, repeats, self.head_dim) if folded else q,
                k[:, :, :places],
                v[:, :, :places],
                attn_mask=mask[:, None, :, :] if masked else None,
                enable_gqa=repeats > 1 and not folded,
            )
            if folded:
                return self.output_proj(context.reshape(batch, 1, -1))
            return self.output_proj(context.transpose(1, 2).reshape(batch, length, -1))
        if repeats > 1:
            # Whole heads: query heads 0 .. repeats - 1 read key/value head 0, and so on.
            k = k.repeat_interleave(repeats, dim=1)
            v = v.repeat_interleave(repeats, dim=1)
        context = self._attention_call(
            q,
            k,
            v,
            mask=mask,
            dropout_p=self.attn_dropout if self.training else 0.0,
            # A cache that exists but is disabled leaves the forward causal (torchtune 0.6.1 drops causality there).
            is_causal=mask is None and self.is_causal,
        )
        return self.output_proj(context.transpose(1, 2).reshape(batch, length, -1))

    def _heads(self, projected: torch.Tensor, norm: nn.Module | None, input_pos: torch.Tensor | None) -> torch.Tensor:
        """Splits [B, T, heads * D] into heads, normalises and rotates them: [B, heads, T, D]."""
        heads = projected.view(projected.shape[0], projected.shape[1], -1, self.head_dim)
        if norm is not None:
            heads = norm(heads)
        return self.pos_embeddings(heads, input_pos=input_pos).transpose(1, 2)
