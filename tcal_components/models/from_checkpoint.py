"""Builders that read the architecture from a checkpoint folder, for any supported teacher."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tcal_components.models._decoder import GdnConfig, build_decoder
from tcal_components.models.hf_config import read_spec
from tcal_components.modules.hybrid_decoder import HybridDecoder


def teacher(*, checkpoint_dir: str | Path, max_seq_len: int | None = None) -> HybridDecoder:
    """Builds the teacher that a folder's config.json describes; its weights are not read.

    Args:
        checkpoint_dir: Hugging Face model folder.
        max_seq_len: Longest sequence in tokens. Default: None, the folder's ``max_position_embeddings``.

    Returns:
        HybridDecoder: The teacher with freshly initialised weights.

    Raises:
        FileNotFoundError: If the folder or its config.json is missing.
        ValueError: For another family or a variant that is not supported.
    """
    return build_decoder(read_spec(checkpoint_dir).with_max_seq_len(max_seq_len))


def hybrid(
    *,
    checkpoint_dir: str | Path,
    retained_layers: Iterable[int],
    gdn: GdnConfig = None,
    max_seq_len: int | None = None,
) -> HybridDecoder:
    """Builds the hybrid of the teacher that a folder's config.json describes; no weights are read.

    Args:
        checkpoint_dir: Hugging Face model folder of the teacher.
        retained_layers: Layers that keep attention.
        gdn: Mapping with keys of ``GatedDeltaNetSpec``. Default: None, its defaults.
        max_seq_len: Longest sequence in tokens. Default: None, the folder's ``max_position_embeddings``.

    Returns:
        HybridDecoder: The hybrid with freshly initialised weights.

    Raises:
        FileNotFoundError: If the folder or its config.json is missing.
        ValueError: For another family, a variant that is not supported, or layers and ``gdn`` that do not fit.
    """
    spec = read_spec(checkpoint_dir).with_max_seq_len(max_seq_len)
    return build_decoder(spec, retained_layers=retained_layers, gdn=gdn)
