"""From a batch of packed documents to the arguments of a model's forward."""

from typing import Any

import torch


def attention_mask(document: torch.Tensor, device: torch.device | str, *, force_bool: bool = False) -> Any:
    """Mask by which a token attends to earlier tokens of its own document.

    Args:
        document (torch.Tensor): [B, T] number of the document of each token, -1 on padding.
        device (torch.device | str): where the mask is used.
        force_bool (bool): a bool mask on CUDA as well, T x T a row, where flex attention cannot be used.

    Returns:
        None if every row is one document (padding may follow it): plain causal attention is then the same and faster.
        Else a flex-attention BlockMask on CUDA, and a bool tensor [B, T, T] elsewhere (True: may attend).
    """
    first = document[:, :1]
    if bool(((first >= 0) & ((document == first) | (document < 0))).all()):
        return None
    device = torch.device(device)
    document = document.to(device)
    batch, length = document.shape
    if device.type == "cuda" and not force_bool:
        from torch.nn.attention.flex_attention import create_block_mask

        def same_document(b: Any, h: Any, q: Any, kv: Any) -> Any:
            return (q >= kv) & (document[b, q] == document[b, kv])

        return create_block_mask(same_document, batch, None, length, length, device=str(device))
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return causal & (document[:, :, None] == document[:, None, :])


def prepare_batch(
    batch: dict[str, torch.Tensor], device: torch.device | str, *, force_bool: bool = False
) -> dict[str, Any]:
    """Moves a batch of a packed dataset to ``device`` and adds its mask.

    ``document`` stays: neither positions nor mask tell padding from documents of one token.

    Args:
        batch (dict[str, torch.Tensor]): ``tokens``, ``labels``, ``input_pos``, ``document``, each [B, T].
        device (torch.device | str): of the model.
        force_bool (bool): see :func:`attention_mask`.

    Returns:
        dict[str, Any]: ``tokens``, ``labels``, ``input_pos``, ``document`` [B, T] and ``mask``. Pop ``labels`` and
        ``document``; the rest are keyword arguments of the model.
    """
    names = ("tokens", "labels", "input_pos", "document")
    moved = {name: batch[name].to(device, non_blocking=True) for name in names}
    return {**moved, "mask": attention_mask(batch["document"], device, force_bool=force_bool)}
