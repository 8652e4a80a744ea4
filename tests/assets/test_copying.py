import pytest
import torch
from embedded_teacher.copying import copy_accuracy, random_copies
from torch import nn


class Induction(nn.Module):
    """Predicts what followed the last earlier occurrence of the current token, if it is at most ``reach`` back."""

    def __init__(self, vocab_size, reach):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.vocab_size, self.reach = vocab_size, reach

    def forward(self, tokens):
        logits = torch.zeros(*tokens.shape, self.vocab_size)
        for row, line in enumerate(tokens.tolist()):
            for t, token in enumerate(line):
                for j in range(t - 1, max(t - self.reach, 0) - 1, -1):
                    if line[j] == token:
                        logits[row, t, line[j + 1]] = 1.0
                        break
        return logits * self.scale


def test_a_copying_model_is_right_within_its_reach():
    model = Induction(5000, reach=20).train()
    result = copy_accuracy(
        model, vocab_size=5000, distances=(8, 16, 24), string_length=8, num_sequences=6, batch_size=4
    )
    assert result["by_distance"][8] == 1.0 and result["by_distance"][16] > 0.95
    assert result["by_distance"][24] < 0.05
    assert result["accuracy"] == pytest.approx(sum(result["by_distance"].values()) / 3)
    assert result["tokens"] == 6 * 7 and model.training


def test_a_model_without_memory_is_at_chance():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
    result = copy_accuracy(model, vocab_size=16, distances=(32,), num_sequences=200, reserved=(0,))
    assert result["chance"] == pytest.approx(1 / 15)
    assert result["accuracy"] < 3 * result["chance"]


def test_rows_hold_the_copy_at_the_distance():
    rows = random_copies(num_sequences=5, distance=12, string_length=4, vocab_size=9, seed=3, reserved=(0, 5))
    assert rows.shape == (5, 16) and torch.equal(rows[:, 12:], rows[:, :4])
    assert not torch.isin(rows, torch.tensor([0, 5])).any() and rows.max() < 9
    assert torch.equal(
        rows, random_copies(num_sequences=5, distance=12, string_length=4, vocab_size=9, seed=3, reserved=(0, 5))
    )


def test_mistakes():
    model = nn.Sequential(nn.Embedding(4, 4))
    with pytest.raises(ValueError, match=r"string_length must be in 2..distance, got 16 for distance 8"):
        copy_accuracy(model, vocab_size=4, distances=(8,))
    with pytest.raises(ValueError, match="at least one distance"):
        copy_accuracy(model, vocab_size=4, distances=())
    with pytest.raises(ValueError, match="leaves no tokens to copy"):
        random_copies(num_sequences=1, distance=4, string_length=2, vocab_size=2, seed=0, reserved=(0, 1))
