"""Padding of packed chat, in batches as the recipes prepare them, changes nothing that is measured or fitted."""

import copy

import pytest
import torch

from tcal_components.align.aligner import Aligner
from tcal_components.align.config import AlignConfig
from tcal_components.align.refit import refit_outputs
from tcal_components.data import BatchStream, from_torchtune, prepare_batch
from tcal_components.initialize.held_out import diagnose
from tcal_components.initialize.initialize import initialize_mixers
from tcal_components.measure.statistics import measure
from tcal_components.modules.conversion import build_mixers, load_mixers
from tcal_components.modules.spec import GatedDeltaNetSpec

LAYERS = [0, 2]
GDN = GatedDeltaNetSpec()


def chat_batches(seq_len, lengths, *, batches=3, pad_id=0):
    """Two rows a batch; the samples of ``lengths`` fill a row of 20 tokens and leave the rest of a longer one to padding."""
    generator = torch.Generator().manual_seed(sum(lengths))
    samples = [
        {"tokens": torch.randint(0, 64, (length,), generator=generator).tolist()}
        for _ in range(2 * batches)
        for length in lengths
    ]
    data = from_torchtune(samples, seq_len=seq_len, pad_id=pad_id)
    assert len(data) == 2 * batches and data.num_tokens == 20 * len(data)
    stream = BatchStream(data, batch_size=2, seed=0, shuffle=False)
    return [prepare_batch(stream.batch(step), "cpu") for step in range(batches)]


# With one sample a row there is no mask, and padding attends to the sample.
@pytest.fixture(params=[(12, 8), (20,)], ids=["packed", "one a row"])
def plain_and_padded(request):
    return chat_batches(20, request.param), chat_batches(26, request.param, pad_id=7)


@pytest.fixture
def mixers(teacher):
    start = initialize_mixers("naive", teacher=teacher, layers=LAYERS, gdn_spec=GDN, statistics=None, batches=[])
    return load_mixers(build_mixers(teacher.spec, GDN, LAYERS), start.weights)


@pytest.mark.parametrize("stacked", [False, True], ids=["layer by layer", "stacked"])
@pytest.mark.parametrize("relative", [False, True], ids=["absolute", "relative"])
def test_alignment(teacher, mixers, plain_and_padded, stacked, relative):
    config = AlignConfig(
        batch_size=2, seq_len=20, warmup_steps=0, lr=6e-3, projection_lr=2e-3, stack_layers=stacked, relative=relative
    )
    found = []
    for batches in plain_and_padded:
        aligner = Aligner(teacher=teacher, mixers=copy.deepcopy(mixers), config=config)
        found.append((aligner.train_step(batches[0]), aligner.evaluate(batches[1:]), aligner.mixers))
    (step, heldout, trained), (padded_step, padded_heldout, padded_trained) = found
    for name in ("error", "grad_norm"):
        assert padded_step[name] == pytest.approx(step[name], rel=1e-4)
    assert padded_heldout == pytest.approx(heldout, rel=1e-4)
    for (name, value), other in zip(trained.named_parameters(), padded_trained.parameters()):
        torch.testing.assert_close(other, value, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_refit(teacher, mixers, plain_and_padded):
    config, found = AlignConfig(), []
    for batches in plain_and_padded:
        refitted = copy.deepcopy(mixers)
        notes = refit_outputs(teacher, refitted, batches[:2], batches[2:], config=config)
        found.append((notes, refitted))
    (notes, refitted), (padded_notes, padded) = found
    for layer in LAYERS:
        assert padded_notes[layer] == pytest.approx(notes[layer], rel=1e-4)
        weight = refitted[str(layer)].output_proj.weight
        assert not torch.equal(weight, mixers[str(layer)].output_proj.weight)
        torch.testing.assert_close(padded[str(layer)].output_proj.weight, weight, rtol=1e-3, atol=1e-4)


def test_measurement_start_and_diagnosis(teacher, mixers, plain_and_padded):
    found = []
    for batches in plain_and_padded:
        statistics = measure(teacher, LAYERS, batches[:2]).finalise()
        start = initialize_mixers(
            "taylor",
            teacher=teacher,
            layers=LAYERS,
            gdn_spec=GDN,
            statistics=statistics,
            batches=batches[:2],
            heldout_batches=batches[2:],
        )
        found.append((statistics, start, diagnose(teacher, mixers, batches)))
    (statistics, start, notes), (padded_statistics, padded_start, padded_notes) = found
    for layer in LAYERS:
        assert padded_statistics.layers[layer].mean_x == pytest.approx(statistics.layers[layer].mean_x, rel=1e-4)
        for name, value in notes[layer].items():
            assert padded_notes[layer][name] == pytest.approx(value, rel=1e-4), name
    for name, value in start.weights.items():
        torch.testing.assert_close(padded_start.weights[name], value, rtol=2e-3, atol=2e-4, msg=lambda m, n=name: n + m)
