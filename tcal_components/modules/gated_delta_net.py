"""The Gated DeltaNet mixer: takes the place of attention in a converted layer."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tcal_components.modules.gated_delta_net_cache import GatedDeltaNetCache
from tcal_components.modules.mixer_parts import DecayParameters, GatedHeadRMSNorm, ShortConvolution
from tcal_components.ops.documents import Documents, document_boundaries
from tcal_components.ops.gated_delta_rule import gated_delta_rule, gated_delta_rule_step
from tcal_components.ops.short_conv import short_conv_step


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet token mixer (arXiv 2412.06464) with the interface of torchtune's attention.

    Per head, with L2-normalised q and k::

        q, k, v = silu(conv(W_q x)), silu(conv(W_k x)), silu(conv(W_v x))
        beta    = sigmoid(W_b x)
        g       = -exp(A_log) * softplus(W_a x + dt_bias)
        o       = gated delta rule of q, k, v, g, beta
        y       = W_o [ rmsnorm(o) * scale * silu(W_g x) ]

    Parameters: ``q_proj``, ``k_proj`` [H K, E], ``v_proj``, ``g_proj`` [H V, E], ``a_proj``, ``b_proj`` [H, E],
    ``output_proj`` [E, H V], ``q_conv``, ``k_conv``, ``v_conv`` [C, 1, W], ``decay.A_log``, ``decay.dt_bias`` [H],
    ``o_norm.scale`` [V]; heads lie one after another in rows.

    Args:
        embed_dim (int): model size E.
        num_heads (int): number of heads H, of keys and of values.
        key_head_dim (int): key size K of a head.
        value_head_dim (int): value size V of a head.
        conv_size (int): taps W of the short convolutions; 0 leaves them out (SiLU stays). Default: 4.
        norm_eps (float): epsilon of the norm after the recurrence. Default: 1e-6.

    Raises:
        ValueError: if a size is not positive, or ``conv_size`` is negative.
    """

    def __init__(
        self,
        *,
        embed_dim: int,
        num_heads: int,
        key_head_dim: int,
        value_head_dim: int,
        conv_size: int = 4,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        sizes = {
            "embed_dim": embed_dim,
            "num_heads": num_heads,
            "key_head_dim": key_head_dim,
            "value_head_dim": value_head_dim,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} is {size}; a Gated DeltaNet layer needs at least 1")
        if conv_size < 0:
            raise ValueError(f"conv_size is {conv_size}; allowed are 0 (no convolution) and positive numbers")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.key_head_dim = key_head_dim
        self.value_head_dim = value_head_dim
        self.conv_size = conv_size
        key_dim, value_dim = num_heads * key_head_dim, num_heads * value_head_dim

        self.q_proj = nn.Linear(embed_dim, key_dim, bias=False)
        self.k_proj = nn.Linear(embed_dim, key_dim, bias=False)
        self.v_proj = nn.Linear(embed_dim, value_dim, bias=False)
        self.g_proj = nn.Linear(embed_dim, value_dim, bias=False)
        self.a_proj = nn.Linear(embed_dim, num_heads, bias=False)
        self.b_proj = nn.Linear(embed_dim, num_heads, bias=False)
        self.output_proj = nn.Linear(value_dim, embed_dim, bias=False)
        self.q_conv = ShortConvolution(channels=key_dim, size=conv_size) if conv_size else None
        self.k_conv = ShortConvolution(channels=key_dim, size=conv_size) if conv_size else None
        self.v_conv = ShortConvolution(channels=value_dim, size=conv_size) if conv_size else None
        self.decay = DecayParameters(num_heads=num_heads)
        self.o_norm = GatedHeadRMSNorm(dim=value_head_dim, eps=norm_eps)

        # What torchtune's decoder expects of the `attn` of a layer.
        self.pos_embeddings = None
        self.kv_cache: GatedDeltaNetCache | None = None
        self.cache_enabled = False
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Gives every parameter the default of flash-linear-attention (projections: normal, 0.02)."""
        for module in self.children():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, (ShortConvolution, DecayParameters, GatedHeadRMSNorm)):
                module.reset_parameters()

    def setup_cache(self, batch_size: int, dtype: torch.dtype, max_seq_len: int | None = None) -> None:
        """Makes the cache for decoding; a cache that exists is kept.

        Args:
            batch_size (int): largest batch.
            dtype (torch.dtype): of the convolution states.
            max_seq_len (int | None): not needed (the state does not grow), taken for torchtune's interface.
        """
        if self.kv_cache is not None:
            return
        channels = (self.q_proj.out_features, self.k_proj.out_features, self.v_proj.out_features)
        self.kv_cache = GatedDeltaNetCache(
            batch_size=batch_size,
            state_shape=(self.num_heads, self.key_head_dim, self.value_head_dim),
            conv_channels=channels if self.conv_size else (),
            conv_size=self.conv_size,
            dtype=dtype,
            device=self.decay.A_log.device,
        )
        self.cache_enabled = True

    def reset_cache(self) -> None:
        """Clears the cache.

        Raises:
            RuntimeError: if there is none.
        """
        if self.kv_cache is None:
            raise RuntimeError("the Gated DeltaNet layer has no cache to reset; call setup_cache() first")
        self.kv_cache.reset()

    def forward(
        self, x: Tensor, y: Tensor | None = None, *, mask: Tensor | None = None, input_pos: Tensor | None = None
    ) -> Tensor:
        """Mixes tokens.

        The state starts anew where ``input_pos == 0`` in a run longer than one token, which covers packed documents,
        left padding (padding at position 0) and the prefill of a cache.

        Args:
            x (Tensor): input, shape [B, T, E].
            y (Tensor | None): ignored (the second input of cross attention).
            mask (Tensor | None): ignored; the layer is causal and knows documents by ``input_pos``.
            input_pos (Tensor | None): positions, shape [B, T] or [T], [B] in a decoding step; without it nothing
                starts anew.

        Returns:
            Tensor: shape [B, T, E].
        """
        cache = self.kv_cache if self.cache_enabled else None
        return self.output_proj(self._gated(x, self._recurrence(x, input_pos, cache)))

    def features(self, x: Tensor, *, input_pos: Tensor | None = None) -> Tensor:
        """The input of ``output_proj``, without the cache.

        Args:
            x (Tensor): input, shape [B, T, E].
            input_pos (Tensor | None): as in :meth:`forward`.

        Returns:
            Tensor: shape [B, T, H V].
        """
        return self._gated(x, self._recurrence(x, input_pos, None))

    def state_output(self, x: Tensor, *, input_pos: Tensor | None = None) -> Tensor:
        """The output of the recurrence before norm and gate, without the cache.

        Args:
            x (Tensor): input, shape [B, T, E].
            input_pos (Tensor | None): as in :meth:`forward`.

        Returns:
            Tensor: shape [B, T, H, V].
        """
        return self._recurrence(x, input_pos, None)

    def _gated(self, x: Tensor, o: Tensor) -> Tensor:
        gate = self.g_proj(x).unflatten(-1, (self.num_heads, -1))
        return self.o_norm(o, gate).flatten(-2)

    def _recurrence(self, x: Tensor, input_pos: Tensor | None, cache: GatedDeltaNetCache | None) -> Tensor:
        batch, length, _ = x.shape
        if cache is not None and batch > cache.batch_size:
            raise ValueError(f"batch of {batch} rows; the cache was set up for at most {cache.batch_size}")
        documents = document_boundaries(input_pos, batch_size=batch, seq_len=length)
        q, k, v = (
            self._convolved(name, x, documents, cache).unflatten(-1, (self.num_heads, -1)) for name in ("q", "k", "v")
        )
        a, b = self.a_proj(x), self.b_proj(x)
        if cache is not None and length == 1:
            o, state = gated_delta_rule_step(
                *(token[:, 0] for token in (q, k, v, a, b)),
                A_log=self.decay.A_log,
                dt_bias=self.decay.dt_bias,
                state=cache.state_before(batch),
            )
            cache.set_state(state)
            return o.unsqueeze(1)
        g = self.decay(a)
        o, final = gated_delta_rule(
            q,
            k,
            v,
            g=g,
            beta=b.to(g.dtype).sigmoid(),
            initial_state=None if cache is None else cache.state_before(batch),
            output_final_state=cache is not None,
            documents=documents,
        )
        if cache is not None:
            assert final is not None
            cache.set_state(final)
        return o

    def _convolved(self, name: str, x: Tensor, documents: Documents | None, cache: GatedDeltaNetCache | None) -> Tensor:
        projected = getattr(self, f"{name}_proj")(x)
        conv = getattr(self, f"{name}_conv")
        if conv is None:
            return F.silu(projected)
        if cache is None:
            return conv(projected, documents=documents)[0]
        batch, length, _ = x.shape
        if length == 1 and not torch.is_grad_enabled():
            return short_conv_step(projected, conv.weight, window=cache.window(name, batch))
        before = cache.inputs_before(name, batch)
        out, inputs = conv(projected, documents=documents, initial_state=before, output_final_state=True)
        cache.set_inputs(name, inputs)
        return out
