import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F

from tcal_components.initialize.initialize import STRATEGIES, InitializeOptions, StartConfig, initialize_mixers
from tcal_components.initialize.projections import copy_projections_, read_attention, read_values
from tcal_components.initialize.strategies import normalised_state
from tcal_components.measure.capture import capture_batch
from tcal_components.measure.statistics import measure
from tcal_components.modules.conversion import build_mixers, load_mixers
from tcal_components.modules.spec import GatedDeltaNetSpec

LAYERS = [1, 2]


@pytest.fixture
def start(make_batch):
    """Runs a strategy on a teacher; returns (mixers, diagnostics, statistics)."""

    def run(teacher, strategy, gdn=None, batches=None, seed=0, **options):
        gdn = gdn or GatedDeltaNetSpec()
        batches = batches or [make_batch(seed, rows=4) for seed in range(5)]
        statistics = measure(teacher, LAYERS, batches).finalise()
        result = initialize_mixers(
            strategy,
            teacher=teacher,
            layers=LAYERS,
            gdn_spec=gdn,
            statistics=statistics,
            batches=batches,
            seed=seed,
            options=InitializeOptions(**options),
        )
        mixers = load_mixers(build_mixers(teacher.spec, gdn, LAYERS), result.weights).requires_grad_(False)
        return mixers, result.diagnostics, statistics

    return run


def captured(teacher, batch, layer):
    seen = []
    capture_batch(teacher, [layer], batch, seen.append)
    return seen[0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_copies_projections_and_starts_with_identity_convolutions(teacher, start, strategy):
    mixers, diagnostics, _ = start(teacher, strategy)
    for layer in LAYERS:
        attention, mixer = teacher.layers[layer].attn, mixers[str(layer)]
        assert torch.equal(mixer.q_proj.weight, attention.q_proj.weight)
        heads = attention.k_proj.weight.unflatten(0, (2, 8))
        for h in range(4) if strategy != "taylor" else ():
            assert torch.equal(mixer.k_proj.weight.unflatten(0, (4, 8))[h], heads[h // 2])
        for conv in (mixer.q_conv, mixer.k_conv, mixer.v_conv):
            assert torch.equal(conv.weight, F.one_hot(torch.tensor(3), 4).expand_as(conv.weight).float())
        notes = diagnostics[layer]
        assert notes["heldout_error"] > 0 and len(notes["half_life"]) == 4 and notes["dropped"] == ["rope"]
        assert all(torch.isfinite(p).all() for p in mixer.parameters())


def test_zero_gate_is_a_no_op(teacher, start, make_batch):
    mixers, diagnostics, _ = start(teacher, "zero_gate")
    x = captured(teacher, make_batch(9), 1).x
    assert not mixers["1"](x).any()
    assert diagnostics[1]["heldout_error"] == pytest.approx(1.0)


def test_published_rules_are_effective(teacher, start, make_batch):
    batches = [make_batch(seed, rows=8) for seed in range(5)]
    mixers, diagnostics, statistics = start(teacher, "taylor_published", batches=batches)
    for layer in LAYERS:
        mixer, notes, stats = mixers[str(layer)], diagnostics[layer], statistics.layers[layer]
        # Decay and write gate, measured on held-out text by the engine and on other text here.
        torch.testing.assert_close(torch.tensor(notes["half_life"]), stats.distance, rtol=1e-4, atol=1e-4)
        target = 0.3 + 0.4 * (1 - stats.entropy)
        torch.testing.assert_close(torch.tensor(notes["write_logit"]), torch.logit(target), rtol=0.05, atol=0.05)
        data = captured(teacher, batches[0], layer)
        torch.testing.assert_close(mixer.b_proj(data.x).mean((0, 1)), torch.logit(target), rtol=0.05, atol=0.05)
        # sigma: the columns of W_o hold the least-squares scale of the *normalised* state output.
        normalised = normalised_state(mixer, data.x, None)
        context = data.context.transpose(1, 2)
        sigma = (context * normalised).sum((0, 1, 3)) / normalised.square().sum((0, 1, 3))
        copied = teacher.layers[layer].attn.output_proj.weight
        torch.testing.assert_close(mixer.output_proj.weight, copied * sigma.repeat_interleave(8), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(torch.tensor(notes["sigma"]), sigma, rtol=1e-3, atol=1e-4)
        # Output gate: a perturbation as large as the teacher's output.
        gate_rms, output_rms = mixer.g_proj(data.x).square().mean().sqrt(), data.y.square().mean().sqrt()
        torch.testing.assert_close(gate_rms, output_rms, rtol=1e-3, atol=1e-5)


def test_a_scale_before_the_norm_is_cancelled_and_the_one_in_the_output_is_not(teacher, start, make_batch):
    mixers, _, _ = start(teacher, "taylor_published")
    mixer, x = mixers["1"].double(), captured(teacher, make_batch(9), 1).x.double()
    mixer.o_norm.eps = 0.0
    before, state = mixer(x), normalised_state(mixer, x, None)
    with torch.no_grad():
        o = 3.0 * mixer.state_output(x)
        torch.testing.assert_close(F.rms_norm(o, (8,), eps=0.0), state)
        mixer.output_proj.weight.mul_(3.0)
    torch.testing.assert_close(mixer(x), 3.0 * before)


def test_taylor_realises_the_sink_free_median_and_opens_the_gate(teacher, start, make_batch):
    batches = [make_batch(seed, rows=8) for seed in range(9)]
    mixers, diagnostics, statistics = start(teacher, "taylor", batches=batches)
    for layer in LAYERS:
        wanted = statistics.layers[layer].median_distance.clamp_min(1.0)
        torch.testing.assert_close(torch.tensor(diagnostics[layer]["half_life"]), wanted, rtol=0.05, atol=0.05)
        data = captured(teacher, batches[0], layer)
        mixer = mixers[str(layer)]
        assert float(mixer.a_proj.weight.std()) == pytest.approx(0.02, rel=0.3), "the random part stays"
        assert float(mixer.g_proj(data.x).mean()) == pytest.approx(1.28, abs=0.1)
        spread = mixer.g_proj.weight - mixer.g_proj.weight.mean(0)
        assert float(spread.std()) == pytest.approx(0.02, rel=0.3)


@pytest.mark.parametrize("key_size", [8, 16])
def test_keys_are_centred_and_nothing_else_of_them_changes(teacher, start, key_size):
    gdn = GatedDeltaNetSpec(key_head_dim=key_size)
    mixers, _, statistics = start(teacher, "taylor", gdn=gdn)
    off, _, _ = start(teacher, "taylor", gdn=gdn, centre_keys=False)
    for layer in LAYERS:
        stats, weight = statistics.layers[layer], mixers[str(layer)].k_proj.weight
        copied = off[str(layer)].k_proj.weight
        # The mean key of the measured text is gone, and it was large before.
        before, after = (copied @ stats.mean_x).norm(), (weight @ stats.mean_x).norm()
        assert float(before) > 0.1 and float(after) < 1e-4 * float(before)
        torch.testing.assert_close(copied - weight, (copied @ stats.mean_x)[:, None] * stats.w_star)
        if key_size == 16:
            halves = weight.unflatten(0, (4, 2, 8))
            torch.testing.assert_close(halves[:, 0], -halves[:, 1])


def test_softmax_does_not_see_what_centring_takes_away():
    torch.manual_seed(0)
    q, k, mean = torch.randn(5, 8).double(), torch.randn(5, 8).double(), 3.0 * torch.randn(8).double()
    torch.testing.assert_close((q @ (k + mean).T).softmax(-1), (q @ k.T).softmax(-1))


def test_low_write_gate_and_small_values_are_realised(teacher, start, make_batch):
    batches = [make_batch(seed, rows=8) for seed in range(9)]
    mixers, diagnostics, _ = start(teacher, "taylor", batches=batches)
    copied, _, _ = start(teacher, "naive", batches=batches)
    for layer in LAYERS:
        assert diagnostics[layer]["beta"] == pytest.approx([0.2] * 4, abs=0.02), "on held-out text"
        torch.testing.assert_close(mixers[str(layer)].v_proj.weight, 0.25 * copied[str(layer)].v_proj.weight)
    options = {"write_level": 0.6, "value_scale": 1.0}
    mixers, diagnostics, _ = start(teacher, "taylor", batches=batches, **options)
    plain, _, _ = start(teacher, "taylor", batches=batches, write_level=None, value_scale=1.0)
    for layer in LAYERS:
        assert diagnostics[layer]["beta"] == pytest.approx([0.6] * 4, abs=0.1)
        assert torch.equal(mixers[str(layer)].v_proj.weight, copied[str(layer)].v_proj.weight)
        assert torch.equal(plain[str(layer)].b_proj.weight, copied[str(layer)].b_proj.weight)


def test_regression_lowers_the_held_out_error(teacher, start, make_batch):
    batches = [make_batch(seed, rows=8) for seed in range(9)]
    error = {}
    for strategy in STRATEGIES:
        _, diagnostics, _ = start(teacher, strategy, batches=batches)
        error[strategy] = sum(diagnostics[layer]["heldout_error"] for layer in LAYERS) / len(LAYERS)
    assert error["taylor"] < min(error["naive"], error["zero_gate"], error["taylor_published"], 1.0)


def test_streamed_regression_equals_one_dense_solve(teacher, start, make_batch):
    batches = [make_batch(seed, lengths=[12, 20]) for seed in range(4)]
    batches[1]["document"][:, -20:] = -1
    mixers, diagnostics, _ = start(teacher, "taylor", batches=batches, pull=0.5)
    mixer, features, targets = mixers["2"], [], []
    for batch in batches[:-1]:
        data, valid = captured(teacher, batch, 2), batch["document"] >= 0
        features.append(mixer.features(data.x, input_pos=batch["input_pos"])[valid])
        targets.append(data.y[valid])
    f, y = torch.cat(features).double(), torch.cat(targets).double()
    copied = teacher.layers[2].attn.output_proj.weight.double()
    copied = copied * torch.tensor(diagnostics[2]["head_scales"]).double().repeat_interleave(8)
    strength = 0.5 * (f.T @ f).diagonal().mean()
    rows = torch.cat([f, strength.sqrt() * torch.eye(f.shape[1]).double()])
    solved = torch.linalg.lstsq(rows, torch.cat([y, strength.sqrt() * copied.T])).solution.T
    torch.testing.assert_close(mixers["2"].output_proj.weight, solved.float(), rtol=1e-4, atol=1e-5)
    fit_error = float((f @ solved.T - y).square().sum() / y.square().sum())
    assert diagnostics[2]["fit_error"] == pytest.approx(fit_error, rel=1e-4)


def test_a_layer_depends_on_the_seed_alone(teacher, start):
    first, _, _ = start(teacher, "taylor", seed=3)
    torch.rand(5)  # the global generator must not matter
    again, _, _ = start(teacher, "taylor", seed=3, layers_per_pass=1)
    other, _, _ = start(teacher, "taylor", seed=4)
    for (name, a), b, c in zip(first.named_parameters(), again.parameters(), other.parameters()):
        assert torch.equal(a, b), name
        if "g_proj" in name:
            assert not torch.equal(a, c)


def test_a_teacher_quantised_to_float8_can_be_read(teacher):
    """As `precision.teacher: float8` leaves it in one process; the product in float8 needs a GPU, the weights do not."""
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    cpu = torch.device("cpu")
    expected = read_attention(teacher.layers[1].attn, teacher.spec, cpu)
    quantised = copy.deepcopy(teacher.layers[1].attn).to(torch.bfloat16)
    quantize_(quantised, Float8WeightOnlyConfig(set_inductor_config=False))
    found = read_attention(quantised, teacher.spec, cpu)
    for name in ("q", "k", "v", "output"):
        value, reference = getattr(found, name), getattr(expected, name)
        assert type(value) is torch.Tensor and value.dtype == torch.float32
        assert 0 < (value - reference).norm() < 0.05 * reference.norm()


def test_signed_keys_and_values(teacher, make_batch):
    source = read_attention(teacher.layers[1].attn, teacher.spec, torch.device("cpu"))
    plain = build_mixers(teacher.spec, GatedDeltaNetSpec(), [1])["1"].double()
    wide = build_mixers(teacher.spec, GatedDeltaNetSpec(key_head_dim=16, value_head_dim=16), [1])["1"].double()
    x = captured(teacher, make_batch(9), 1).x.double()
    for mixer in (plain, wide):
        copy_projections_(mixer, source)
    with torch.no_grad():
        for name in ("a_proj", "b_proj", "decay"):
            getattr(wide, name).load_state_dict(getattr(plain, name).state_dict())
    q = F.silu(wide.q_proj(x)).unflatten(-1, (4, 16))
    projected = (x @ source.q.double().T).unflatten(-1, (4, 8))
    torch.testing.assert_close(q[..., :8], F.silu(projected))
    torch.testing.assert_close(q[..., :8] - q[..., 8:], projected)
    # The state is linear in the values: two halves minus each other is the state of the teacher's own linear values.
    state = wide.state_output(x)
    linear = build_mixers(teacher.spec, GatedDeltaNetSpec(key_head_dim=16), [1])["1"].double()
    copy_projections_(linear, source)
    with torch.no_grad():
        for name in ("a_proj", "b_proj", "decay"):
            getattr(linear, name).load_state_dict(getattr(plain, name).state_dict())
        positive = linear.state_output(x)
        linear.v_proj.weight.neg_()
        negative = linear.state_output(x)
    torch.testing.assert_close(read_values(state, 8), positive - negative)
    torch.testing.assert_close(state[..., :8], positive)
    ones = torch.ones(16).double()
    flat = (state * ones).flatten(-2)
    torch.testing.assert_close(wide.output_proj(flat), read_values(state, 8).flatten(-2) @ source.output.double().T)


@pytest.mark.parametrize("gdn", [{"key_head_dim": 16}, {"value_head_dim": 16}, {"conv_size": 0}])
def test_wider_heads_start_well_too(teacher, start, gdn):
    for strategy in ("taylor", "taylor_published"):
        _, diagnostics, _ = start(teacher, strategy, gdn=GatedDeltaNetSpec(**gdn))
        assert all(torch.isfinite(torch.tensor(diagnostics[layer]["heldout_error"])) for layer in LAYERS)
    assert all(diagnostics[layer]["alpha"] > 0 for layer in LAYERS)


@pytest.mark.parametrize("extra, dropped", [({"qkv_bias": True}, "qkv_bias"), ({"qk_norm": True}, "qk_norm")])
def test_biases_and_norms_are_folded_where_that_helps(make_teacher, start, extra, dropped):
    teacher = make_teacher(**extra)
    errors = {}
    for fold in ("never", "always", "auto"):
        mixers, diagnostics, statistics = start(teacher, "taylor", fold=fold)
        errors[fold] = [diagnostics[layer]["heldout_error"] for layer in LAYERS]
        if fold != "auto":
            assert all(diagnostics[layer]["folded"] is (fold == "always") for layer in LAYERS)
            assert all((dropped in diagnostics[layer]["dropped"]) is (fold == "never") for layer in LAYERS)
        if fold == "always":
            attention, stats = teacher.layers[1].attn, statistics.layers[1]
            expected = attention.q_proj.weight
            if attention.q_proj.bias is not None:
                expected = expected + attention.q_proj.bias[:, None] * stats.w_star
            if attention.q_norm is not None:
                expected = expected * attention.q_norm.scale.repeat(4)[:, None]
            torch.testing.assert_close(mixers["1"].q_proj.weight, expected)
    assert errors["auto"] == [min(pair) for pair in zip(errors["always"], errors["never"])]


def test_packed_documents_do_not_leak(teacher, start, make_batch):
    mixers, _, _ = start(teacher, "taylor", batches=[make_batch(seed, lengths=[12, 20]) for seed in range(3)])
    batch = make_batch(9, lengths=[12, 20])
    data = captured(teacher, batch, 1)
    packed = mixers["1"](data.x, input_pos=batch["input_pos"])[:, 12:]
    torch.testing.assert_close(packed, mixers["1"](data.x[:, 12:]), rtol=1e-4, atol=1e-5)


def test_user_mistakes(teacher, start, make_batch):
    common = {"teacher": teacher, "layers": LAYERS, "gdn_spec": GatedDeltaNetSpec(), "statistics": None, "batches": []}
    with pytest.raises(ValueError, match="unknown initialize.strategy 'best'; allowed: naive"):
        initialize_mixers("best", **common)
    with pytest.raises(ValueError, match="needs the statistics of layer 1"):
        initialize_mixers("taylor", **common)
    with pytest.raises(ValueError, match="gdn.key_head_dim is 12"):
        initialize_mixers("naive", **{**common, "gdn_spec": GatedDeltaNetSpec(key_head_dim=12)})
    statistics = measure(teacher, LAYERS, [make_batch()]).finalise()
    with pytest.raises(ValueError, match="needs calibration batches"):
        initialize_mixers("taylor", **{**common, "statistics": statistics})
    numbers = (
        {"write_level": 1.0},
        {"value_scale": 0.0},
    )
    for wrong in numbers:
        with pytest.raises(ValueError, match=f"^{next(iter(wrong))} is"):
            InitializeOptions(**wrong)
    for wrong in ({"fold": False}, {"pull": -1.0}, {"layers_per_pass": 0}):
        with pytest.raises(ValueError, match=f"^{next(iter(wrong))} is"):
            InitializeOptions(**wrong)
    assert initialize_mixers("naive", **common).diagnostics[1]["heldout_error"] is None


def test_a_start_of_a_config_gives_its_numbers_alone():
    @dataclasses.dataclass(frozen=True)
    class Named(StartConfig):
        name: str | None = None

    assert type(Named().options) is InitializeOptions
    assert Named(strategy="naive", pull=3.0, name="a").options == InitializeOptions(pull=3.0)
