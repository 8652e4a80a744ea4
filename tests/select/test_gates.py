"""One gate a layer: what the gated model computes, and which layers the training keeps open."""

import pytest
import torch

from tcal_components.data.packed import IGNORE_INDEX
from tcal_components.modules.conversion import build_mixers, converted
from tcal_components.modules.spec import GatedDeltaNetSpec
from tcal_components.select.gates import GateConfig, gated, repeat_halves, train_gates

GDN = GatedDeltaNetSpec()


@pytest.fixture
def mixers(teacher):
    torch.manual_seed(0)
    return build_mixers(teacher.spec, GDN, range(teacher.spec.num_layers)).requires_grad_(False)


def forward(model, batch):
    with torch.no_grad():
        return model(batch["tokens"], mask=batch.get("mask"), input_pos=batch.get("input_pos"))


def test_open_gates_are_the_teacher_and_shut_ones_the_student(teacher, mixers, make_batch):
    batch, attention = make_batch(1, lengths=[12, 20]), [layer.attn for layer in teacher.layers]
    expected = forward(teacher, batch)
    with gated(teacher, mixers, torch.ones(len(mixers))):
        torch.testing.assert_close(forward(teacher, batch), expected, rtol=1e-5, atol=1e-6)
    with converted(teacher, mixers):
        expected = forward(teacher, batch)
    with gated(teacher, mixers, torch.zeros(len(mixers))):
        torch.testing.assert_close(forward(teacher, batch), expected, rtol=1e-5, atol=1e-6)
    assert [layer.attn for layer in teacher.layers] == attention


def test_the_layer_that_its_mixer_cannot_replace_stays_open(teacher, mixers, make_batch):
    """All mixers repeat their attention but one: that layer's gate is the open one, and the sum is the budget."""
    needed = 1

    class Perfect(torch.nn.Module):
        def __init__(self, attention, mask):
            super().__init__()
            self.attention, self.mask = attention, mask

        def forward(self, x, *, input_pos=None):
            return self.attention(x, x, mask=self.mask, input_pos=input_pos)

    batch = make_batch(1, rows=4, lengths=[32])
    perfect = torch.nn.ModuleDict(
        {
            name: mixer if int(name) == needed else Perfect(teacher.layers[int(name)].attn, batch["mask"])
            for name, mixer in mixers.items()
        }
    )
    for parameter in perfect.parameters():
        parameter.requires_grad_(False)
    before = [parameter.clone() for parameter in teacher.parameters()]
    gates = train_gates(teacher, perfect, [batch] * 60, 1, config=GateConfig(steps=60, lr=0.2))
    assert int(gates.argmax()) == needed and gates[needed] > 0.7 and gates.sum() == pytest.approx(1.0, abs=0.5)
    assert all(torch.equal(now, then) for now, then in zip(teacher.parameters(), before))


def test_repeated_halves_count_where_they_can_be_copied(make_batch):
    batch = make_batch(1, rows=2)
    found = repeat_halves(batch)
    half = batch["tokens"].shape[1] // 2
    assert torch.equal(found["tokens"][:, :half], found["tokens"][:, half : 2 * half])
    counted = found["labels"] != IGNORE_INDEX
    assert not counted[:, :half].any() and not counted[:, -1].any() and counted[:, half:-1].all()
    assert torch.equal(found["labels"][:, half:-1], found["tokens"][:, half + 1 :])


def test_mistakes(teacher, mixers, make_batch):
    with pytest.raises(ValueError, match="needs select.num_layers of at least 1"):
        train_gates(teacher, mixers, [], 0, config=GateConfig())
    with pytest.raises(ValueError, match="ended after 1 of 2 steps"):
        train_gates(teacher, mixers, [make_batch(1)], 1, config=GateConfig(steps=2))
