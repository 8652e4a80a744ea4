"""Perplexity against a float64 reference and against transformers' own loss."""

import math

import pytest
import torch
import torch.nn.functional as F

from tcal_components.evaluation import evaluation_batches, perplexity, perplexity_by_context


def _reference(model, rows) -> tuple[list[tuple[int, float]], float]:
    """Every document alone through a plain forward, float64: [(position, nll)] and the mean."""
    found = []
    with torch.no_grad():
        for index in range(len(rows)):
            item = rows[index]
            for number in item["document"].unique():
                tokens = item["tokens"][item["document"] == number]
                logits = model(tokens[None])[0].double()
                nll = F.cross_entropy(logits[:-1], tokens[1:], reduction="none")
                found += [(position, value.item()) for position, value in enumerate(nll)]
    return found, sum(value for _, value in found) / len(found)


@pytest.mark.parametrize("kind", ["teacher", "hybrid"])
@pytest.mark.parametrize("batch_size, chunk_tokens", [(1, 1024), (2, 7), (5, 1)])
def test_equals_a_float64_reference(kind, batch_size, chunk_tokens, rows, request):
    model = request.getfixturevalue(kind).double()
    found, loss = _reference(model, rows)
    result = perplexity(model, rows, batch_size=batch_size, chunk_tokens=chunk_tokens, position_edges=(0, 4, 30))
    assert result.tokens == len(found)
    assert result.loss == pytest.approx(loss, rel=1e-6)  # the decoder's own forward returns float32 logits
    assert result.perplexity == pytest.approx(math.exp(loss), rel=1e-5)
    for row, (low, high) in zip(result.by_position, ((0, 4), (4, 30), (30, 10**9))):
        inside = [value for position, value in found if low <= position < high]
        assert row["tokens"] == len(inside)
        assert row["nll_sum"] == pytest.approx(sum(inside), rel=1e-6)
    assert sum(row["nll_sum"] for row in result.by_position) == pytest.approx(result.nll_sum)


def test_mean_weighs_tokens_not_batches(teacher, rows):
    batches = list(evaluation_batches(rows, batch_size=2))
    batches[0]["labels"][:, 3:] = -100  # batches of very different numbers of labels
    whole = perplexity(teacher, batches)
    parts = [perplexity(teacher, [batch]) for batch in batches]
    assert whole.tokens == sum(part.tokens for part in parts)
    assert whole.nll_sum == pytest.approx(sum(part.nll_sum for part in parts))
    unweighted = sum(part.loss for part in parts) / len(parts)
    assert abs(whole.loss - unweighted) > 1e-4


def test_equals_transformers_loss_and_our_decoder(hf_pair, rows):
    theirs, ours = hf_pair
    plain = [{name: value[None] for name, value in rows[0].items()}]  # one document a row
    expected = theirs(input_ids=plain[0]["tokens"], labels=plain[0]["tokens"]).loss.item()
    assert perplexity(theirs, plain).loss == pytest.approx(expected, rel=1e-5)
    assert perplexity(ours, plain).loss == pytest.approx(expected, rel=1e-5)


def test_packed_documents_are_the_same_task_for_both_kinds_of_model(hf_pair, rows):
    theirs, ours = hf_pair
    one, other = perplexity(theirs, rows, batch_size=2), perplexity(ours, rows, batch_size=2)
    assert one.tokens == other.tokens
    assert one.nll_sum == pytest.approx(other.nll_sum, rel=1e-5)
    for left, right in zip(one.by_position, other.by_position):
        assert left["tokens"] == right["tokens"] and left["nll_sum"] == pytest.approx(right["nll_sum"], rel=1e-4)


def test_padding_is_not_counted_nor_seen(hf_pair, rows):
    item = {name: value.clone() for name, value in rows[0].items()}
    item["document"][20:] = -1
    item["input_pos"][20:] = 0
    item["labels"][19:] = -100
    batch = {name: value[None] for name, value in item.items()}
    short = {name: value[None, :20] for name, value in item.items()}
    for model in hf_pair:
        assert perplexity(model, [batch]).tokens == 19
        assert perplexity(model, [batch]).nll_sum == pytest.approx(perplexity(model, [short]).nll_sum, rel=1e-5)


def test_shares_of_processes_cover_every_sequence_once_in_equally_many_batches(rows):
    whole = torch.cat([batch["tokens"] for batch in evaluation_batches(rows, batch_size=4)])
    assert torch.equal(whole, rows.tokens)
    shares = [list(evaluation_batches(rows, batch_size=3, rank=rank, world_size=2)) for rank in range(2)]
    assert len(shares[0]) == len(shares[1]) == 2
    seen = [row["tokens"] for share in shares for row in share if (row["labels"] != -100).any()]
    assert sorted(torch.cat(seen)[:, 0].tolist()) == sorted(rows.tokens[:, 0].tolist())
    assert sum((batch["labels"] != -100).sum() for share in shares for batch in share) == sum(
        (rows[index]["labels"] != -100).sum() for index in range(len(rows))
    )


def test_by_context_scores_the_same_tokens(teacher, rows):
    values = perplexity_by_context(teacher, rows, lengths=(8, 40), scored=8, batch_size=2)
    with torch.no_grad():
        for length, value in values.items():
            tokens = rows.tokens[:, -length:]
            nll = F.cross_entropy(teacher(tokens)[:, -8:-1].flatten(0, 1), tokens[:, -7:].flatten(), reduction="none")
            keep = torch.stack([rows[index]["labels"][-8:-1] != -100 for index in range(len(rows))]).flatten()
            assert value == pytest.approx(nll[keep].mean().exp().item(), rel=1e-5)
    with pytest.raises(ValueError, match="context length 41"):
        perplexity_by_context(teacher, rows, lengths=(41,), scored=8)


def test_modes_are_restored_and_no_gradient_is_kept(teacher, rows):
    teacher.train()
    perplexity(teacher, rows)
    assert teacher.training and all(parameter.grad is None for parameter in teacher.parameters())


def test_autocast_changes_little(teacher, rows):
    exact = perplexity(teacher, rows).loss
    low = perplexity(teacher, rows, autocast_dtype=torch.bfloat16).loss
    assert low != exact and low == pytest.approx(exact, rel=0.01)


def test_user_mistakes_are_one_line(teacher, rows):
    batch = next(evaluation_batches(rows, batch_size=1))
    batch["labels"].fill_(-100)
    with pytest.raises(ValueError, match="no token to predict"):
        perplexity(teacher, [batch])
    with pytest.raises(ValueError, match="cannot evaluate a Linear"):
        perplexity(torch.nn.Linear(2, 2), [batch])
