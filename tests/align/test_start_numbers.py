"""Random draws and options of a start, seen in the weights and in what the layers do."""

import itertools

import pytest
import torch

from tcal_components.initialize.initialize import InitializeOptions, initialize_mixers
from tcal_components.measure.statistics import measure
from tcal_components.modules.spec import GatedDeltaNetSpec

LAYERS = [0, 1, 2]
RANDOM = {
    "naive": ("a_proj", "b_proj", "g_proj"),
    "taylor_published": ("g_proj",),
    "taylor": ("a_proj", "g_proj"),
}


@pytest.fixture
def start(teacher, make_batch):
    batches = [make_batch(seed, rows=4) for seed in range(3)]
    statistics = measure(teacher, LAYERS, batches).finalise()

    def run(strategy, *, layers=LAYERS, seed=0, **options):
        return initialize_mixers(
            strategy,
            teacher=teacher,
            layers=layers,
            gdn_spec=GatedDeltaNetSpec(),
            statistics=statistics,
            batches=batches,
            heldout_batches=[make_batch(9, rows=4)],
            seed=seed,
            options=InitializeOptions(**options),
        )

    run.statistics = statistics
    return run


@pytest.mark.parametrize("strategy", RANDOM)
def test_every_layer_and_seed_has_a_draw_of_its_own(start, strategy):
    """Neighbouring seeds too: layer 1 of seed 0 is not layer 0 of seed 1."""
    drawn = {(seed, layer): start(strategy, seed=seed).weights for seed in (0, 1) for layer in LAYERS}
    for name in RANDOM[strategy]:
        rows = [weights[f"layers.{layer}.attn.{name}.weight"] for (_, layer), weights in drawn.items()]
        # Without what is common to all rows of a matrix, such as the level of a gate.
        parts = [(weight - weight.mean(0)).flatten() for weight in rows]
        for first, second in itertools.combinations(parts, 2):
            assert abs(torch.cosine_similarity(first, second, dim=0)) < 0.5, name


@pytest.mark.parametrize("strategy", RANDOM)
def test_a_layer_does_not_depend_on_which_others_are_converted(start, strategy):
    alone, together = start(strategy, layers=[1]).weights, start(strategy).weights
    for name, value in alone.items():
        torch.testing.assert_close(value, together[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy, name", [("taylor_published", "distance"), ("taylor", "median_distance")])
def test_half_lives_are_the_distances_that_the_strategy_reads(start, strategy, name):
    found = start(strategy).diagnostics
    for layer in LAYERS:
        wanted = getattr(start.statistics.layers[layer], name).clamp_min(1.0)
        assert found[layer]["half_life"] == pytest.approx(wanted.tolist(), rel=0.1)


def test_options_of_the_features_are_realised(start):
    weights = {
        name: start("taylor", **options).weights
        for name, options in {
            "plain": {"centre_keys": False, "value_scale": 1.0, "write_level": 0.5},
            "small": {"centre_keys": False, "value_scale": 0.125, "write_level": 0.5},
            "low": {"centre_keys": False, "value_scale": 1.0, "write_level": 0.1},
        }.items()
    }
    for layer in LAYERS:
        w_star = start.statistics.layers[layer].w_star
        of = lambda name, part, layer=layer: weights[name][f"layers.{layer}.attn.{part}.weight"]
        assert torch.equal(of("small", "v_proj"), of("plain", "v_proj") * 0.125)
        assert not of("plain", "b_proj").any(), "logit(0.5) = 0"
        low = torch.logit(torch.tensor(0.1)) * w_star
        torch.testing.assert_close(of("low", "b_proj"), low.expand_as(of("low", "b_proj")), rtol=1e-5, atol=1e-6)
