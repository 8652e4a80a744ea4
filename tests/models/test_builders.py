"""Builders, specifications and their refusals; sizes on the meta device."""

import dataclasses
import inspect

import pytest
import torch
from omegaconf import OmegaConf
from torchtune import config as torchtune_config

from tcal_components import models
from tcal_components.models import _decoder, llama3_2, qwen2_5, qwen3
from tcal_components.models.memory import optimizer_bytes
from tcal_components.modules.spec import DecoderSpec, GatedDeltaNetSpec

# Trainable parameters as published (a tied head counts once).
PUBLISHED = {
    "smollm2_135m": 134_515_008,
    "smollm2_360m": 361_821_120,
    "llama3_2_1b": 1_235_814_400,
    "llama3_2_3b": 3_212_749_824,
    "qwen2_5_0_5b": 494_032_768,
    "qwen2_5_1_5b": 1_543_714_304,
    "qwen2_5_3b": 3_085_938_688,
    "qwen2_5_7b": 7_615_616_512,
    "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
}
SPECS = {**llama3_2.SPECS, **qwen2_5.SPECS, **qwen3.SPECS}
TINY = {
    "vocab_size": 31,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 24,
    "intermediate_dim": 20,
    "max_seq_len": 32,
}
DECODERS = {
    "llama3_2": models.llama3_2_decoder,
    "qwen2_5": models.qwen2_5_decoder,
    "qwen3": models.qwen3_decoder,
}


def parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_every_spec_has_a_published_size():
    assert set(SPECS) == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_teacher_has_published_size(name):
    with torch.device("meta"):
        model = getattr(models, name)()
    assert parameters(model) == PUBLISHED[name] == models.count_parameters(SPECS[name])[0]
    assert model.spec == SPECS[name] and model.converted_layers == () and model.retained_layers is None


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("gdn", [None, {"conv_size": 0, "key_head_dim": 256, "value_head_dim": 96}])
def test_hybrid_builds_on_meta(name, gdn):
    spec = SPECS[name]
    retained = list(range(0, spec.num_layers, 4))
    with torch.device("meta"):
        model = getattr(models, f"{name}_hybrid")(retained_layers=retained, gdn=gdn, max_seq_len=256)
    total, mixers = models.count_parameters(spec, retained_layers=retained, gdn=gdn)
    assert parameters(model) == total
    assert sum(parameters(model.layers[index].attn) for index in model.converted_layers) == mixers
    assert model.max_seq_len == model.spec.max_seq_len == 256
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("family", DECODERS)
def test_hybrid_layout(family):
    model = DECODERS[family](**TINY, retained_layers=[2, 0], gdn={"key_head_dim": 10})
    assert model.retained_layers == (0, 2) and model.converted_layers == (1, 3)
    head_dim = model.spec.head_dim
    assert model.gdn == GatedDeltaNetSpec(conv_size=4, key_head_dim=10, value_head_dim=head_dim)
    state = model.state_dict()
    assert state["layers.1.attn.k_proj.weight"].shape == (40, 24)
    assert state["layers.1.attn.v_proj.weight"].shape == (4 * head_dim, 24)
    assert model.layers[3].attn.o_norm.eps == model.spec.norm_eps
    assert ("layers.0.attn.q_norm.scale" in state) == (family == "qwen3")
    assert ("layers.0.attn.q_proj.bias" in state) == (family == "qwen2_5")
    assert "output.weight" not in state
    # What stays is named as in the teacher, so that its weights load without a table.
    teacher = DECODERS[family](**TINY).state_dict()
    kept = {key for key in state if not key.startswith(("layers.1.attn", "layers.3.attn"))}
    assert kept == {key for key in teacher if not key.startswith(("layers.1.attn", "layers.3.attn"))}
    logits = model(torch.arange(12)[None])
    assert logits.shape == (1, 12, 31) and logits.dtype == torch.float32 and logits.isfinite().all()


def test_all_or_no_layers_converted():
    assert models.llama3_2_decoder(**TINY, retained_layers=[]).converted_layers == (0, 1, 2, 3)
    assert models.llama3_2_decoder(**TINY, retained_layers=range(4)).converted_layers == ()


@pytest.mark.parametrize("hybrid", [False, True])
def test_meta_then_materialise(hybrid):
    arguments = {**TINY, **({"retained_layers": [1, 3]} if hybrid else {})}
    torch.manual_seed(0)
    built = models.llama3_2_decoder(**arguments)
    with torch.device("meta"):
        materialised = models.llama3_2_decoder(**arguments)
    assert all(buffer.is_meta for buffer in materialised.buffers())
    # Deterministic mode fills what `to_empty` hands out with NaN: the table of angles must be filled by itself.
    torch.use_deterministic_algorithms(True)
    try:
        materialised.to_empty(device="cpu")
        assert all(parameter.isnan().all() for parameter in materialised.parameters())
    finally:
        torch.use_deterministic_algorithms(False)
    materialised.load_state_dict(built.state_dict())
    tokens = torch.arange(20)[None]
    torch.testing.assert_close(materialised(tokens), built(tokens), rtol=0, atol=0)


def test_rope_init_gives_storage_where_only_parameters_got_some():
    with torch.device("meta"):
        model = models.qwen3_decoder(**TINY)
    rope = model.layers[0].attn.pos_embeddings
    with torch.device("cpu"):
        for module in model.modules():
            if hasattr(module, "rope_init"):
                module.rope_init()
    torch.testing.assert_close(rope.table, models.qwen3_decoder(**TINY).layers[2].attn.pos_embeddings.table)


def test_angles_survive_a_trip_through_bfloat16():
    model = models.llama3_2_decoder(**TINY)
    before = model.layers[0].attn.pos_embeddings.table.clone()
    model.to(torch.bfloat16).float()
    assert torch.equal(model.layers[0].attn.pos_embeddings.table, before)


def test_torchtune_instantiates_from_config():
    config = OmegaConf.create(
        {
            "_component_": "tcal_components.models.smollm2_135m_hybrid",
            "retained_layers": [0, 4],
            "gdn": {"conv_size": 2},
            "max_seq_len": 16,
        }
    )
    with torch.device("meta"):
        model = torchtune_config.instantiate(config)
    assert model.retained_layers == (0, 4) and model.gdn.conv_size == 2 and len(model.converted_layers) == 28


def test_builders_are_introspectable():
    builder = models.qwen3_8b_hybrid
    assert builder.__name__ == "qwen3_8b_hybrid" and builder.__module__ == "tcal_components.models.qwen3"
    assert list(inspect.signature(builder).parameters) == ["retained_layers", "gdn", "max_seq_len"]
    assert "0 to 35" in builder.__doc__


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"retained_layers": [4]}, "retained_layers contains 4; the teacher has 4 layers, so 0 to 3 is allowed"),
        ({"retained_layers": [-1]}, "retained_layers contains -1"),
        ({"retained_layers": [1, 1]}, "layer 1 more than once"),
        ({"retained_layers": ["a"]}, "retained_layers contains 'a'"),
        ({"retained_layers": [True]}, "retained_layers contains True"),
        ({"retained_layers": [1.0]}, "retained_layers contains 1.0"),
        ({"retained_layers": "0,1"}, "must be a list of layer indices"),
        ({"retained_layers": 3}, "must be a list of layer indices"),
        (
            {"retained_layers": [0], "gdn": {"conv": 4}},
            r"unknown key 'conv' in gdn \(did you mean 'conv_size'\?\); allowed: conv_size",
        ),
        ({"retained_layers": [0], "gdn": {"conv_size": -1}}, "gdn.conv_size is -1"),
        ({"retained_layers": [0], "gdn": {"key_head_dim": 0}}, "gdn.key_head_dim is 0"),
        ({"retained_layers": [0], "gdn": 4}, "gdn is 4"),
        ({"gdn": {"conv_size": 4}}, "gdn was given without retained_layers"),
        ({"num_heads": 5}, "num_heads is 5; it must be a multiple of num_kv_heads 2"),
        ({"head_dim": 7}, "head_dim is 7; it must be even"),
        ({"max_seq_len": 0}, "max_seq_len is 0"),
        ({"rope_scaling": {"factor": 8.0}}, "llama3 scaling needs factor, low_freq_factor"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        models.llama3_2_decoder(**{**TINY, **arguments})
    assert "\n" not in str(error.value)


def test_spec_is_checked_and_frozen():
    spec = SPECS["qwen3_8b"]
    with pytest.raises(ValueError, match="family is 'gpt2'; allowed: llama3_2, qwen2_5, qwen3"):
        dataclasses.replace(spec, family="gpt2")
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.num_layers = 1
    assert spec.with_max_seq_len(None) is spec
    assert DecoderSpec(**dataclasses.asdict(spec)) == spec


def test_too_long_sequence_is_refused():
    model = models.llama3_2_decoder(**TINY)
    for call in (model, model.hidden):
        with pytest.raises(ValueError, match="33"):
            call(torch.zeros(1, 33, dtype=torch.long))


def test_attention_without_keys_is_refused():
    attention = models.llama3_2_decoder(**TINY).layers[0].attn
    with pytest.raises(ValueError, match="no enabled key/value cache"):
        attention(torch.zeros(1, 1, 24))


def test_memory_estimate():
    spec = SPECS["qwen3_8b"]
    retained = range(3, 36, 4)
    estimate = models.estimate_memory(spec, retained_layers=retained, student_dtype=torch.bfloat16)
    assert estimate.teacher_bytes == 2 * PUBLISHED["qwen3_8b"]
    total, mixers = models.count_parameters(spec, retained_layers=retained)
    assert estimate.student_bytes == 2 * total and estimate.distillation_bytes == 6 * total
    assert estimate.alignment_bytes == 12 * mixers
    assert "teacher 8,190.7 M parameters, 15.26 GiB" in estimate.summary() and "\n" not in estimate.summary()
    teacher, student = 2 * PUBLISHED["qwen3_8b"], 8 * total
    assert estimate.of_process(["measure", "export"], processes=1) == teacher
    # Of teacher and student each process has a part, of mixers outside of a student every one has all.
    assert estimate.of_process(["initialize"], processes=4) == teacher / 4 + 4 * mixers
    assert estimate.of_process(["measure", "initialize", "align"], processes=4) == teacher / 4 + 16 * mixers
    assert estimate.of_process(["distill"], processes=4) == (teacher + student) / 4
    assert estimate.of_process(["distill"], processes=8, dp_replicate=4) == (teacher + student) / 2
    assert estimate.of_process(["align", "distill"], processes=64) == teacher / 64 + 16 * mixers


def test_a_float8_teacher_takes_less_in_one_process_only():
    wide, narrow = (
        models.estimate_memory(SPECS["qwen3_8b"], retained_layers=[3], float8_teacher=float8)
        for float8 in (False, True)
    )
    saved = wide.of_process(["measure"], processes=1) - narrow.of_process(["measure"], processes=1)
    assert saved == PUBLISHED["qwen3_8b"] - 2 * 151936 * 4096  # embedding and head stay
    assert wide.of_process(["measure"], processes=2) == narrow.of_process(["measure"], processes=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "component",
    [
        None,
        {"_component_": "torch.optim.Adam", "amsgrad": True},
        {"_component_": "torch.optim.SGD", "lr": 0.1},
        {"_component_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9},
        {"_component_": "torchao.optim.AdamW8bit"},
        {"_component_": "torchao.optim.AdamW4bit"},
        {"_component_": "torchao.optim.AdamWFp8"},
    ],
)
def test_bytes_of_an_optimizer_are_those_of_its_state(component, dtype):
    parameter = torch.nn.Parameter(torch.zeros(1 << 17, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torchtune_config.instantiate(
        OmegaConf.create(component or {"_component_": "torch.optim.AdamW"}), [parameter]
    )
    torch.compiler.set_stance("force_eager")  # torchao compiles its step
    try:
        optimizer.step()
    finally:
        torch.compiler.set_stance("default")
    found = 0
    for value in optimizer.state[parameter].values():
        if isinstance(value, torch.Tensor):
            inner = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else None
            parts = [value] if inner is None else [getattr(value, name) for name in inner if name != "qmap"]
            found += sum(part.numel() * part.itemsize for part in parts)
    assert found / parameter.numel() == pytest.approx(optimizer_bytes(component, dtype), abs=1e-3)
    unknown = {"_component_": "some.library.Novel"}
    assert optimizer_bytes(unknown, dtype) == 2 * dtype.itemsize


def test_only_hybrids_need_the_mixer(monkeypatch):
    def fail(*_):
        raise AssertionError("a teacher asked for the mixer")

    monkeypatch.setattr(_decoder, "_gated_delta_net", fail)
    assert models.qwen3_decoder(**TINY).converted_layers == ()
