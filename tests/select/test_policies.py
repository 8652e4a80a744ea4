import json

import pytest
import torch

from tcal_components.checkpoint.artifact import Artifact
from tcal_components.initialize.initialize import initialize_mixers
from tcal_components.models.retained import RetainConfig, resolve_retained
from tcal_components.modules.conversion import build_mixers, converted, load_mixers
from tcal_components.modules.spec import GatedDeltaNetSpec
from tcal_components.select.policies import (
    rank_by,
    rank_by_ablation,
    rank_by_kl,
    rank_by_single_keep,
    rank_uniform,
)
from tcal_components.select.scores import NoAttention, ScoreFile, Scorer

NEEDED = 1


@pytest.fixture
def batches(make_batch):
    return [make_batch(3, lengths=[12, 20]), make_batch(4, lengths=[32])]


@pytest.fixture
def planted(teacher, batches):
    """A teacher whose layer 1 alone puts out much, and labels that this teacher predicts."""
    with torch.no_grad():
        for index, layer in enumerate(teacher.layers):
            layer.attn.output_proj.weight.mul_(6.0 if index == NEEDED else 0.02)
        for batch in batches:
            del batch["mask"]
            positions = batch["input_pos"]
            batch["labels"] = torch.stack(
                [
                    torch.cat([teacher(row[None, part])[0].argmax(-1) for part in _documents(document)])
                    for row, document in zip(batch["tokens"], batch["document"])
                ]
            )
            batch["labels"][positions == 3] = -100
    return teacher


def _documents(document):
    return [document == number for number in document.unique()]


@pytest.fixture
def mixers(planted):
    gdn = GatedDeltaNetSpec()
    start = initialize_mixers(
        "zero_gate", teacher=planted, layers=range(3), gdn_spec=gdn, statistics=None, batches=[], seed=1
    )
    return load_mixers(build_mixers(planted.spec, gdn, range(3)), start.weights)


@pytest.fixture
def scorer(planted, batches):
    return Scorer(planted, batches, progress=False)


def test_the_planted_layer_is_ranked_first(planted, scorer, mixers):
    before = {name: value.clone() for name, value in planted.state_dict().items()}
    ablation = rank_by_ablation(scorer, 3, ScoreFile())
    single = rank_by_single_keep(scorer, mixers, ScoreFile())
    guided = rank_by_kl(scorer, mixers, 2, ScoreFile())
    for ranking in (ablation, single, guided):
        assert ranking.layers[0] == NEEDED and sorted(ranking.layers) == [0, 1, 2]
        assert ranking.scores[NEEDED] == max(ranking.scores.values()) > 0
    # A shut mixer is no attention at all, so both policies see the same numbers.
    assert single.details["all_converted_loss"] > ablation.details["teacher_loss"]
    assert list(planted.state_dict()) == list(before), "the attention is back in its place"
    assert all(torch.equal(value, before[name]) for name, value in planted.state_dict().items())


def test_loss_and_kl_are_those_of_the_written_out_computation(planted, scorer, batches):
    dropped = torch.nn.ModuleDict({"0": NoAttention(), "1": NoAttention()})
    nll = kl = count = 0.0
    for batch in batches:
        causal = torch.ones(32, 32, dtype=torch.bool).tril()
        mask = causal & (batch["document"][:, :, None] == batch["document"][:, None, :])
        arguments = {"mask": mask, "input_pos": batch["input_pos"]}
        with torch.no_grad():
            p = planted(batch["tokens"], **arguments).double().log_softmax(-1)
            with converted(planted, dropped):
                q = planted(batch["tokens"], **arguments).double().log_softmax(-1)
        counted = batch["labels"] != -100
        nll -= float(q.gather(-1, batch["labels"].clamp_min(0)[..., None])[..., 0][counted].sum())
        kl += float((p.exp() * (p - q)).sum(-1)[counted].sum())
        count += int(counted.sum())
    assert scorer.tokens == count
    assert scorer.loss(dropped) == pytest.approx(nll / count, rel=1e-5)
    assert scorer.kl(dropped) == pytest.approx(kl / count, rel=1e-4)
    assert scorer.kl(torch.nn.ModuleDict()) == pytest.approx(0.0, abs=1e-6)


def test_kl_guided_is_greedy(scorer, mixers):
    ranking = rank_by_kl(scorer, mixers, 3, ScoreFile())
    kept = []
    for position in range(3):
        candidates = {
            layer: scorer.kl(torch.nn.ModuleDict({k: m for k, m in mixers.items() if int(k) not in (*kept, layer)}))
            for layer in range(3)
            if layer not in kept
        }
        assert ranking.layers[position] == min(candidates, key=candidates.get)
        kept.append(ranking.layers[position])
        assert ranking.details["rounds"][position]["kl"] == pytest.approx(min(candidates.values()), abs=1e-6)
    assert ranking.details["rounds"][-1]["kl"] == pytest.approx(0.0, abs=1e-6)


def test_an_interrupted_ranking_continues(tmp_path, scorer, mixers, monkeypatch):
    path = tmp_path / "scores" / "single_keep.json"
    whole = rank_by_single_keep(scorer, mixers, ScoreFile(Artifact(tmp_path / "other.json", {})))
    measured, original = [], scorer.loss

    def loss(replaced=None):
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(sorted(replaced))
        return original(replaced)

    monkeypatch.setattr(scorer, "loss", loss)
    with pytest.raises(KeyboardInterrupt):
        rank_by_single_keep(scorer, mixers, ScoreFile(Artifact(path, {"text": "a"})))
    assert len(json.loads(path.read_text())["values"]) == 2
    measured.clear()
    monkeypatch.setattr(scorer, "loss", lambda replaced=None: measured.append(1) or original(replaced))
    continued = rank_by_single_keep(scorer, mixers, ScoreFile(Artifact(path, {"text": "a"})))
    assert len(measured) == 2 and continued == whole
    assert ScoreFile(Artifact(path, {"text": "b"})).values == {}, "made from other inputs"


def test_scores_that_are_not_finite_are_refused():
    with pytest.raises(FloatingPointError, match="without 3 is nan"):
        ScoreFile().get("without 3", lambda: float("nan"))


def test_text_without_labels_is_refused(teacher, make_batch):
    batch = make_batch(1, lengths=[32])
    with pytest.raises(ValueError, match="no token to predict"):
        Scorer(teacher, [{**batch, "labels": torch.full_like(batch["tokens"], -100)}])


def test_rankings_without_measurements():
    uniform = rank_uniform(6, 3)
    assert uniform.layers == (0, 2, 4, 1, 3, 5) and set(uniform.scores.values()) == {None}
    assert rank_by({0: 0.2, 1: 0.5, 2: 0.5}).layers == (1, 2, 0)


def test_the_written_set_is_read(tmp_path):
    path = tmp_path / "set.json"
    path.write_text(json.dumps({"ranking": [3, 0, 2, 1], "retained_layers": [0, 3]}))
    assert resolve_retained(RetainConfig(policy="file", path=str(path)), 4) == (0, 3)
    assert resolve_retained(RetainConfig(policy="file", path=str(path), num_layers=3), 4) == (0, 2, 3)
