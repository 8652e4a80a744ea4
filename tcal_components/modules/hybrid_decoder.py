"""The decoder of teachers and hybrids: torchtune's, with its specification and its hidden states within reach."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torchtune.modules import TiedLinear, TransformerDecoder
from torchtune.modules.attention_utils import _MaskType

if TYPE_CHECKING:
    from tcal_components.modules.spec import DecoderSpec, GatedDeltaNetSpec


class HybridDecoder(TransformerDecoder):
    """A torchtune decoder whose layers hold attention or a Gated DeltaNet as ``attn``.

    Args:
        spec: Numbers of the teacher.
        gdn: Shape of the Gated DeltaNet layers with both head sizes filled in; None for a teacher.
        retained_layers: Indices that keep attention, ascending; None for a teacher.
        tok_embeddings: Embedding [vocab_size, E].
        layers: One ``TransformerSelfAttentionLayer`` per layer.
        norm: Final norm.
        output: Head, E -> vocab_size; a ``TiedLinear`` over the embedding when tied.

    Attributes:
        converted_layers (tuple[int, ...]): Indices of the Gated DeltaNet layers, ascending; empty for a teacher.
    """

    def __init__(
        self,
        *,
        spec: DecoderSpec,
        gdn: GatedDeltaNetSpec | None,
        retained_layers: tuple[int, ...] | None,
        tok_embeddings: nn.Embedding,
        layers: nn.ModuleList,
        norm: nn.Module,
        output: nn.Module | TiedLinear,
    ) -> None:
        super().__init__(
            tok_embeddings=tok_embeddings,
            layers=layers,
            max_seq_len=spec.max_seq_len,
            num_heads=spec.num_heads,
            head_dim=spec.head_dim,
            norm=norm,
            output=output,
        )
        self.spec = spec
        self.gdn = gdn
        self.retained_layers = retained_layers
        kept = range(spec.num_layers) if retained_layers is None else retained_layers
        self.converted_layers = tuple(index for index in range(spec.num_layers) if index not in kept)

    def setup_caches(
        self,
        batch_size: int,
        dtype: torch.dtype,
        *,
        encoder_max_seq_len: int | None = None,
        decoder_max_seq_len: int | None = None,
    ) -> None:
        """Sets up the key/value caches and recurrent states on the device of the weights.

        Args:
            batch_size: Sequences decoded together.
            dtype: Type of the caches.
            encoder_max_seq_len: Not used by a decoder.
            decoder_max_seq_len: Longest prompt plus answer. Default: ``spec.max_seq_len``.
        """
        # torchtune allocates on the default device and leaves it to the caller to make that the model's. Not the device of
        # the embedding: FSDP2 may keep that in host memory while the root, with the norm, is gathered.
        with next(self.norm.parameters()).device:
            super().setup_caches(
                batch_size,
                dtype,
                encoder_max_seq_len=encoder_max_seq_len,
                decoder_max_seq_len=decoder_max_seq_len,
            )

    def hidden(
        self, tokens: torch.Tensor, *, mask: _MaskType | None = None, input_pos: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Computes the final-normed hidden states, from which the head makes logits.

        Under FSDP2 this runs outside ``forward``, so it needs ``register_fsdp_forward_method(model, "hidden")``.

        Args:
            tokens: Token ids [B, T].
            mask: Boolean mask [B, T, T] (True means may attend) or a BlockMask; None means causal.
            input_pos: Positions [B, T] or [T]; None means 0 to T - 1.

        Returns:
            torch.Tensor: Hidden states [B, T, E].
        """
        self._validate_inputs(tokens.shape[1], mask=mask, input_pos=input_pos)
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, mask=mask, input_pos=input_pos)
        return self.norm(h)
