"""The options by which the published alignment is told apart: fixed text, frozen parts, absolute error."""

import pytest
import torch

from tcal_components.align.aligner import Aligner
from tcal_components.align.config import AlignConfig
from tcal_components.align.optimizer import LearningRates, learning_rates, parameter_groups
from tcal_components.initialize.initialize import initialize_mixers
from tcal_components.measure.capture import capture_batch
from tcal_components.modules.conversion import build_mixers, load_mixers
from tcal_components.modules.gated_delta_net import GatedDeltaNet
from tcal_components.modules.spec import GatedDeltaNetSpec

LAYERS = [0, 2]
PUBLISHED = {"relative": False, "frozen": ("output_proj", "o_norm"), "fixed_sequences": 4, "warmup_steps": 0}
PUBLISHED |= {"lr": 6e-3, "projection_lr": 2e-3}


@pytest.fixture
def make_mixers(teacher):
    def make():
        gdn = GatedDeltaNetSpec()
        start = initialize_mixers(
            "naive", teacher=teacher, layers=LAYERS, gdn_spec=gdn, statistics=None, batches=[], seed=1
        )
        return load_mixers(build_mixers(teacher.spec, gdn, LAYERS), start.weights)

    return make


def test_frozen_parts_stay_and_the_rest_moves(teacher, make_mixers, make_batch):
    mixers, before = make_mixers(), make_mixers()
    aligner = Aligner(teacher=teacher, mixers=mixers, config=AlignConfig(weight_decay=0.1, **PUBLISHED))
    aligner.train_step(make_batch(1))
    for (name, value), old in zip(mixers.named_parameters(), before.parameters()):
        frozen = name.split(".")[1] in PUBLISHED["frozen"]
        assert torch.equal(value, old) == frozen, name


def test_absolute_error_is_the_mean_square(teacher, make_mixers, make_batch):
    batch = make_batch(7, rows=4, lengths=[12, 20])
    batch["document"][:2, -20:] = -1  # padding must not count
    config = AlignConfig(**PUBLISHED)
    mixers, reference = make_mixers(), make_mixers()
    aligner = Aligner(teacher=teacher, mixers=mixers, config=config)
    measured = aligner.train_step(batch)
    for layer in LAYERS:
        seen, mixer = [], reference[str(layer)]
        for name, parameter in mixer.named_parameters():
            parameter.requires_grad_(name.split(".")[0] not in config.frozen)
        capture_batch(teacher, [layer], batch, seen.append)
        valid = batch["document"] >= 0
        y, output = seen[0].y[valid], mixer(seen[0].x, input_pos=batch["input_pos"])[valid]
        (output - y).square().mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(mixer.parameters(), config.max_grad_norm)
        optimizer = torch.optim.AdamW(parameter_groups(mixer, config), betas=config.betas, weight_decay=0.0)
        optimizer.step()
        relative = float((output.detach() - y).square().sum() / y.square().sum())
        assert measured["error"][layer] == pytest.approx(relative, rel=1e-5), "what is reported stays relative"
        assert measured["grad_norm"][layer] == pytest.approx(float(norm), rel=1e-4)
        for (name, parameter), expected in zip(mixers[str(layer)].named_parameters(), mixer.parameters()):
            torch.testing.assert_close(parameter, expected, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_tokens_of_text():
    numbers = {"steps": 300, "batch_size": 4, "seq_len": 256}
    assert AlignConfig(**numbers, refit_tokens=0).text_tokens == 300 * 4 * 256
    assert AlignConfig(**numbers, frozen=("output_proj",)).text_tokens == 300 * 4 * 256, "not polished"
    assert AlignConfig(**numbers, refit_tokens=1025).text_tokens == 302 * 4 * 256, "whole batches"
    assert AlignConfig(**numbers, fixed_sequences=4).text_tokens == 4 * 256
    assert AlignConfig(steps=0, seq_len=256, refit_tokens=0).text_tokens == 256


def test_mistakes():
    with pytest.raises(ValueError, match="frozen.0. is 'o_proj'.*; allowed: q_proj, .*o_norm"):
        AlignConfig(frozen=("o_proj",))
    with pytest.raises(ValueError, match="fixed_sequences is 0"):
        AlignConfig(fixed_sequences=0)


def _mixer(width, size):
    """A Gated DeltaNet of one head whose q and k have weights of this root mean square."""
    mixer = GatedDeltaNet(embed_dim=width, num_heads=1, key_head_dim=8, value_head_dim=8)
    for linear in (mixer.q_proj, mixer.k_proj):
        torch.nn.init.normal_(linear.weight)
        linear.weight.data.mul_(size / linear.weight.square().mean().sqrt())
    return mixer


def test_rates_left_open_suit_width_and_weights():
    small = learning_rates([_mixer(576, 0.2)], AlignConfig())
    assert small.projections == pytest.approx(2.08e-3, rel=1e-2) and small.gates == small.others == 6e-3
    wide = learning_rates([_mixer(2048, 0.03), _mixer(2048, 0.01)], AlignConfig())
    mean = (0.5 * (0.03**2 + 0.01**2)) ** 0.5  # the same rate for both layers
    assert wide.projections == pytest.approx(0.25 * mean / 2048**0.5, rel=1e-5)
    assert wide.gates == pytest.approx(3.5 / 2048) and wide.others == 6e-3


def test_rates_that_are_given_hold():
    given = AlignConfig(lr=1e-3, projection_lr=1e-4)
    assert learning_rates([_mixer(2048, 0.02)], given) == LearningRates(1e-4, 1e-3, 1e-3)
    half = learning_rates([_mixer(2048, 0.02)], AlignConfig(projection_lr=1e-4))
    assert half.projections == 1e-4 and half.gates == pytest.approx(3.5 / 2048)
