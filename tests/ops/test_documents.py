import gc

import pytest
import torch

from tcal_components.ops import document_boundaries, documents_from_starts
from tcal_components.ops.documents import _MEMO


def test_boundaries_of_a_packed_batch():
    input_pos = torch.tensor([[0, 1, 2, 0, 1], [3, 4, 5, 6, 0]])
    documents = document_boundaries(input_pos, batch_size=2, seq_len=5)
    assert documents.packed
    assert documents.starts.tolist() == [[True, False, False, True, False], [False, False, False, False, True]]
    assert documents.cu_seqlens.tolist() == documents.cu_seqlens_cpu.tolist() == [0, 3, 5, 9, 10]
    assert documents.first.tolist() == [0, 2]
    assert documents.last.tolist() == [1, 3]
    assert documents.age[0].tolist() == [0, 1, 2, 0, 1]
    assert documents.age[1, 4] == 0 and (documents.age[1, :4] > 1 << 30).all()


def test_one_document_a_row_is_not_packed():
    documents = document_boundaries(torch.arange(4), batch_size=3, seq_len=4)
    assert not documents.packed and documents.cu_seqlens.tolist() == [0, 4, 8, 12]
    assert documents.starts.tolist() == [[True, False, False, False]] * 3


def test_a_single_token_starts_nothing():
    assert document_boundaries(torch.zeros(3, dtype=torch.long), batch_size=3, seq_len=1) is None
    assert document_boundaries(None, batch_size=3, seq_len=8) is None


def test_layers_share_one_result_and_a_changed_tensor_gets_a_fresh_one():
    input_pos = torch.tensor([[0, 1, 0, 1]])
    first = document_boundaries(input_pos, batch_size=1, seq_len=4)
    assert document_boundaries(input_pos, batch_size=1, seq_len=4) is first
    input_pos.copy_(torch.tensor([[0, 0, 1, 2]]))
    second = document_boundaries(input_pos, batch_size=1, seq_len=4)
    assert second.cu_seqlens is not first.cu_seqlens
    assert second.cu_seqlens.tolist() == [0, 1, 4]
    del input_pos
    gc.collect()
    assert all(value[1] is not second for value in _MEMO.values())


def test_inference_tensors_are_not_memoised():
    with torch.inference_mode():
        input_pos = torch.tensor([[0, 1, 0, 1]])
        before = document_boundaries(input_pos, batch_size=1, seq_len=4)
        input_pos[0, 1] = 0
        after = document_boundaries(input_pos, batch_size=1, seq_len=4)
    assert before.cu_seqlens.tolist() == [0, 2, 4]
    assert after.cu_seqlens.tolist() == [0, 1, 2, 4]


def test_wrong_shape_is_named():
    with pytest.raises(ValueError, match=r"input_pos has shape \[3\]; expected \[2, 4\] or \[4\]"):
        document_boundaries(torch.arange(3), batch_size=2, seq_len=4)


def test_starts_on_the_host_do_not_alias():
    documents = documents_from_starts(torch.tensor([[True, True]]))
    assert documents.cu_seqlens.data_ptr() != documents.cu_seqlens_cpu.data_ptr()
