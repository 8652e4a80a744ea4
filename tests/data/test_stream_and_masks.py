import itertools

import pytest
import torch
from torchtune.models.llama3 import llama3

from tcal_components.data import BatchStream, attention_mask, packed_text, prepare_batch


class Numbers(torch.utils.data.Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"tokens": torch.tensor([index])}


def collect(steps, start=0, **options):
    stream = BatchStream(Numbers(10), batch_size=4, seed=5, start_step=start, **options)
    return [next(stream)["tokens"].flatten().tolist() for _ in range(steps)]


def test_two_processes_see_the_same_global_batches():
    whole = collect(7)
    ranks = [collect(7, rank=rank, world_size=2) for rank in (0, 1)]
    assert [a + b for a, b in zip(*ranks)] == whole


def test_resume_at_any_step_with_another_number_of_processes():
    whole = collect(9)
    for step in (1, 4, 5):
        assert collect(3, start=step) == whole[step : step + 3]
        assert collect(2, start=step, rank=1, world_size=4) == [[b[1]] for b in whole[step : step + 2]]


def test_each_epoch_is_another_permutation():
    flat = list(itertools.chain(*collect(10)))
    epochs = [flat[i : i + 10] for i in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert list(itertools.chain(*collect(5, shuffle=False))) == [*range(10)] * 2


def test_neighbouring_seeds_do_not_share_permutations():
    first = [BatchStream(Numbers(10), batch_size=10, seed=0).indices(step) for step in range(3)]
    second = [BatchStream(Numbers(10), batch_size=10, seed=1).indices(step) for step in range(3)]
    assert not any(a == b for a in first for b in second)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 3}, "positive multiple of their number: got 4 for 3 processes"),
        ({"rank": 2, "world_size": 2}, "rank must be in 0..1"),
        ({"start_step": -1}, "must be >= 0"),
    ],
)
def test_stream_mistakes(options, message):
    with pytest.raises(ValueError, match=message):
        BatchStream(Numbers(10), **{"batch_size": 4, "seed": 0, **options})


def test_empty_dataset_is_refused():
    with pytest.raises(ValueError, match="no sequence"):
        BatchStream(Numbers(0), batch_size=1, seed=0)


def test_mask_is_block_causal_and_none_for_single_documents():
    document = torch.tensor([[0, 0, 1, 1, -1], [0, 0, 0, 0, 0]])
    mask = attention_mask(document, "cpu")
    for row in range(2):
        for t in range(5):
            for j in range(5):
                assert mask[row, t, j] == (j <= t and document[row, t] == document[row, j])
    assert mask.any(-1).all()  # no row without a key: softmax would give NaN
    assert attention_mask(document[1:], "cpu") is None
    assert attention_mask(torch.tensor([[0, 0, -1]]), "cpu") is None
    assert attention_mask(torch.tensor([[-1, 0, 0]]), "cpu") is not None


def test_packed_documents_equal_separate_documents(tmp_path, tokenizer, write_jsonl):
    texts = ["abc", "a somewhat longer document", "xy", "the last one, which is cut"]
    dataset = packed_text(tokenizer, source=write_jsonl(tmp_path / "a.jsonl", texts), seq_len=48)
    torch.manual_seed(0)
    model = llama3(
        vocab_size=tokenizer.vocab_size, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=32, max_seq_len=64,
        intermediate_dim=48,
    )  # fmt: skip
    batch = prepare_batch({name: value[None] for name, value in dataset[0].items()}, "cpu")
    labels, document = batch.pop("labels")[0], batch.pop("document")
    assert torch.equal(document[0], dataset[0]["document"])  # which padding is known by
    assert batch["mask"].shape == (1, 48, 48)
    packed = model(**batch)[0]
    begin = 0
    for text in texts:
        ids = torch.tensor(tokenizer.encode(text, add_eos=True))[: 48 - begin]
        alone = model(ids[None])[0]
        torch.testing.assert_close(packed[begin : begin + len(ids)], alone, rtol=0, atol=1e-5)
        assert torch.equal(labels[begin : begin + len(ids) - 1], ids[1:])
        begin += len(ids)
    without = model(batch["tokens"])[0]
    assert (packed - without)[10:].abs().max() > 1e-2  # the mask and the positions do matter


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_block_mask_equals_the_bool_mask():
    document = torch.arange(200).div(37, rounding_mode="floor").expand(2, -1).clone()
    document[1, 150:] = -1
    flex = attention_mask(document, "cuda")
    dense = attention_mask(document, "cuda", force_bool=True)
    q, k, v = (torch.randn(2, 2, 200, 32, device="cuda") for _ in range(3))
    from torch.nn.attention.flex_attention import flex_attention

    got = torch.compile(flex_attention)(q, k, v, block_mask=flex)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense[:, None])
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
