"""Agreement of student and teacher against plain formulas."""

import pytest
import torch

from tcal_components.evaluation import evaluation_batches
from tcal_components.evaluation.agreement import agreement
from tcal_components.models._decoder import build_decoder


def test_equals_plain_formulas(teacher, hybrid, rows):
    item = {name: value[None] for name, value in rows[0].items()}  # one document: no mask needed
    keep = item["labels"] != -100
    states = {}
    for name, model in (("t", teacher), ("s", hybrid)):
        model.output_hidden_states = [1]  # torchtune counts inputs of layers: the state after layer 0
        with torch.no_grad():
            first, logits = model(item["tokens"])
            last = model.layers[1](first)
        states[name] = (first[keep], last[keep], logits[keep].log_softmax(-1))
        model.output_hidden_states = []
    result = agreement(teacher, hybrid, [item], chunk_tokens=7)
    assert result.tokens == int(keep.sum())
    for layer in (0, 1):
        t, s = states["t"][layer], states["s"][layer]
        expected = ((s - t).square().sum(-1) / t.square().sum(-1)).mean().item()
        assert result.layers[layer] == pytest.approx(expected, rel=1e-4)
    p, q = states["t"][2], states["s"][2]
    assert result.top1 == pytest.approx((p.argmax(-1) == q.argmax(-1)).float().mean().item())
    assert result.kl == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-4)
    assert result.as_dict()["layers"].keys() == {"0", "1"}


def test_a_model_agrees_with_itself(teacher, rows):
    result = agreement(teacher, teacher, evaluation_batches(rows, batch_size=2))
    assert result.top1 == 1.0 and result.kl == 0.0 and set(result.layers.values()) == {0.0}


def test_agrees_across_kinds_of_model(hf_pair, rows):
    theirs, ours = hf_pair
    for teacher, student in ((theirs, ours), (ours, theirs)):
        result = agreement(teacher, student, evaluation_batches(rows, batch_size=2))
        assert result.tokens == sum(int((rows[i]["labels"] != -100).sum()) for i in range(len(rows)))
        assert result.top1 > 0.99 and abs(result.kl) < 1e-5 and max(result.layers.values()) < 1e-8


def test_different_shapes_are_refused(teacher, spec, rows):
    batches = list(evaluation_batches(rows, batch_size=2))
    more = build_decoder(type(spec)(**{**vars(spec), "num_layers": 3}))
    with pytest.raises(ValueError, match="the teacher has 2 layers, the student 3"):
        agreement(teacher, more, batches)
    wider = build_decoder(type(spec)(**{**vars(spec), "vocab_size": 64}))
    with pytest.raises(ValueError, match="vocabularies differ, teacher 61, student 64"):
        agreement(teacher, wider, batches)
