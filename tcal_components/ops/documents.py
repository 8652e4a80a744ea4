"""Where documents start in a packed or left-padded batch, in the forms that the kernels want."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


@dataclass(frozen=True, eq=False)
class Documents:
    """Document starts of one run of tokens, computed once and shared by all layers of a forward.

    Attributes:
        starts (Tensor): bool, shape [B, T]; True at the first token of each document. Column 0 is True only where the
            row begins a document; elsewhere the row continues the state that it is given.
        age (Tensor): int64, shape [B, T]; tokens since the start of the document, and a number larger than any
            sequence where the document began before this run.
        packed (bool): whether any document starts after the first token of a row.
        cu_seqlens (Tensor): int64, shape [N + 1], on the device of ``starts``; boundaries of the flattened batch,
            where every row is a boundary too.
        cu_seqlens_cpu (Tensor): the same on the host.
        first (Tensor): int64, shape [B]; index in ``cu_seqlens`` of the first piece of each row.
        last (Tensor): int64, shape [B]; index of the last piece of each row.
    """

    starts: Tensor
    age: Tensor
    packed: bool
    cu_seqlens: Tensor
    cu_seqlens_cpu: Tensor
    first: Tensor
    last: Tensor


def documents_from_starts(starts: Tensor) -> Documents:
    """Builds :class:`Documents` from a mask of first tokens.

    One copy from device to host is made, none where ``starts`` lies on the host.

    Args:
        starts (Tensor): bool, shape [B, T]; True at the first token of each document.

    Returns:
        Documents: with fresh tensors. flash-linear-attention memoises its index helpers by the identity of
            ``cu_seqlens``, so a tensor that changed in place would silently give the indices of the step before.
    """
    batch, length = starts.shape
    index = torch.arange(length, device=starts.device)
    never = -(1 << 40)
    age = index - torch.where(starts, index, never).cummax(dim=1).values
    starts_cpu = starts.cpu()
    pieces = starts_cpu.clone()
    pieces[:, 0] = True
    bounds = torch.cat([pieces.flatten().nonzero().flatten(), torch.tensor([batch * length])])
    last = pieces.sum(dim=1).cumsum(dim=0) - 1
    first = torch.cat([torch.zeros(1, dtype=last.dtype), last[:-1] + 1])
    device = starts.device
    return Documents(
        starts=starts,
        age=age,
        packed=bool(starts_cpu[:, 1:].any()),
        # clone: on the host `.to` would return the same object, and the two must not alias.
        cu_seqlens=bounds.clone().to(device),
        cu_seqlens_cpu=bounds,
        first=first.to(device),
        last=last.to(device),
    )


_MEMO: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


@torch.compiler.disable
def document_boundaries(input_pos: Tensor | None, *, batch_size: int, seq_len: int) -> Documents | None:
    """Document starts from token positions, memoised on the tensor so that the layers of a forward share one result.

    A document starts where ``input_pos == 0`` in a run longer than one token. That one rule covers packed documents
    (positions restart), left padding (every padding token has position 0) and the prefill of a cache. A run of one
    token is a decoding step and never a start: the cache is cleared by ``reset_cache()``.

    Args:
        input_pos (Tensor | None): positions, shape [B, T], or [T] (or [1, T]) for all rows; [B] in a decoding step.
        batch_size (int): B.
        seq_len (int): T.

    Returns:
        Documents | None: None where nothing can start (no positions, or a single token).

    Raises:
        ValueError: if the shape of ``input_pos`` fits neither [B, T] nor [T].
    """
    if input_pos is None or seq_len == 1:
        return None
    if input_pos.numel() not in (batch_size * seq_len, seq_len):
        raise ValueError(
            f"input_pos has shape {list(input_pos.shape)}; expected [{batch_size}, {seq_len}] or [{seq_len}]"
        )
    # Inference tensors carry no version counter, so a change in place would go unseen: compute anew.
    memoise = not input_pos.is_inference()
    key = (input_pos._version if memoise else -1, batch_size, seq_len)
    if memoise and (hit := _MEMO.get(input_pos)) is not None and hit[0] == key:
        return hit[1]
    starts = (input_pos.detach() == 0).reshape(-1, seq_len).expand(batch_size, seq_len).contiguous()
    documents = documents_from_starts(starts)
    if memoise:
        _MEMO[input_pos] = (key, documents)
    return documents
