"""Text and chat data: tokenizer, packed datasets, resumable batches, masks."""

from tcal_components.data.chat import from_torchtune, packed_chat
from tcal_components.data.disjoint import assert_disjoint
from tcal_components.data.masks import attention_mask, prepare_batch
from tcal_components.data.mixed import mixed_text
from tcal_components.data.packed import IGNORE_INDEX, PackedTextDataset, packed_text
from tcal_components.data.stream import BatchStream
from tcal_components.data.tokenizer import HFTokenizer, hf_tokenizer

__all__ = [
    "IGNORE_INDEX",
    "BatchStream",
    "HFTokenizer",
    "PackedTextDataset",
    "assert_disjoint",
    "attention_mask",
    "from_torchtune",
    "hf_tokenizer",
    "mixed_text",
    "packed_chat",
    "packed_text",
    "prepare_batch",
]
