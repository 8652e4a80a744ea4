"""Reading teacher folders: what is accepted, and one clear line for everything else."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tcal_components import models
from tcal_components.checkpoint.names import hf_to_torchtune, teacher_tensors, torchtune_to_hf
from tcal_components.checkpoint.teacher import HFTeacherCheckpointer, load_teacher_state_dict, read_spec

NUMBERS = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
CONFIGS = {
    "llama": transformers.LlamaConfig(**NUMBERS, tie_word_embeddings=False),
    "qwen2": transformers.Qwen2Config(**NUMBERS, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**NUMBERS, head_dim=8, tie_word_embeddings=True),
}


@pytest.fixture(scope="module", params=CONFIGS)
def any_folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    transformers.AutoModelForCausalLM.from_config(CONFIGS[request.param]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pristine_shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"]).save_pretrained(folder, max_shard_size="4KB")
    return folder


@pytest.fixture(scope="module")
def pristine_single(tmp_path_factory):
    folder = tmp_path_factory.mktemp("single")
    transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"]).save_pretrained(folder)
    return folder


@pytest.fixture
def shards(pristine_shards, tmp_path):
    return shutil.copytree(pristine_shards, tmp_path / "teacher")


@pytest.fixture
def single(pristine_single, tmp_path):
    return shutil.copytree(pristine_single, tmp_path / "teacher")


def edit_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        if value is ...:
            config.pop(key, None)
        else:
            config[key] = value
    path.write_text(json.dumps(config))


def edit_weights(folder, **changes):
    """Replaces, adds or (with ...) removes tensors of model.safetensors; dots are written as double underscores."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for key, value in changes.items():
        name = key.replace("__", ".")
        if value is ...:
            tensors.pop(name)
        else:
            tensors[name] = value(tensors.get(name))
    save_file(tensors, path, metadata={"format": "pt"})


def refusal(folder, kind=ValueError):
    with pytest.raises(kind) as error:
        load_teacher_state_dict(folder)
    message = str(error.value)
    assert "\n" not in message and len(message) < 400
    assert str(folder) in message, "the line must say where"
    return message


def test_table_equals_model(any_folder):
    spec = read_spec(any_folder)
    with torch.device("meta"):
        state = models.build_decoder(spec).state_dict()
    assert {entry.torchtune: entry.shape for entry in teacher_tensors(spec)} == {
        k: tuple(v.shape) for k, v in state.items()
    }


def test_weights_are_bit_equal_and_round_trip(any_folder):
    spec = read_spec(any_folder)
    stored = load_file(any_folder / "model.safetensors")
    state = load_teacher_state_dict(any_folder)
    back = torchtune_to_hf(state, spec)
    assert back.keys() == stored.keys()
    assert all(torch.equal(back[name], stored[name]) for name in stored)
    again = hf_to_torchtune(back, spec)
    assert list(again) == list(state) and all(again[name] is state[name] for name in state)


def test_mapping_refuses_what_does_not_fit(any_folder):
    spec = read_spec(any_folder)
    state = load_teacher_state_dict(any_folder)
    with pytest.raises(ValueError, match="tensor norm.scale is missing"):
        torchtune_to_hf({k: v for k, v in state.items() if k != "norm.scale"}, spec)
    with pytest.raises(ValueError, match=r"tensor norm.scale has shape \(3,\); \(16,\) is needed"):
        torchtune_to_hf({**state, "norm.scale": torch.ones(3)}, spec)


def test_one_file_and_many_give_the_same(shards):
    with_index = load_teacher_state_dict(shards)
    (shards / "model.safetensors.index.json").unlink()
    without_index = load_teacher_state_dict(shards)
    assert list(with_index) == list(without_index)
    assert all(torch.equal(with_index[name], without_index[name]) for name in with_index)


def test_dtype_is_converted(single):
    stored = load_file(single / "model.safetensors")
    assert load_teacher_state_dict(single)["norm.scale"].dtype == torch.float32
    state = HFTeacherCheckpointer(single, dtype="bf16").load_checkpoint()["model"]
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    assert torch.equal(state["output.weight"], stored["lm_head.weight"].bfloat16())
    with pytest.raises(ValueError, match="dtype is 'int8'; allowed: bf16, fp16, fp32, fp64"):
        HFTeacherCheckpointer(single, dtype="int8")


def test_checkpointer_refuses_at_once(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        HFTeacherCheckpointer(tmp_path / "nothing")


def test_missing_folder_and_config(tmp_path):
    assert "does not exist or is not a folder" in refusal(tmp_path / "nothing", FileNotFoundError)
    assert "has no config.json" in refusal(tmp_path, FileNotFoundError)


@pytest.mark.parametrize(
    ("content", "message"), [("{", "is not valid JSON"), ("[]", "holds a list"), ("null", "holds null")]
)
def test_broken_config(single, content, message):
    (single / "config.json").write_text(content)
    assert message in refusal(single)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mistral"}, "model_type is 'mistral'; supported teachers are llama (Llama-3.2, SmolLM2)"),
        ({"model_type": ...}, "model_type is None"),
        ({"model_type": "qwen3_moe"}, "mixture of experts"),
        ({"num_local_experts": 8}, "mixture of experts"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised (quantization_config, method awq)"),
        ({"quantization_config": "awq"}, "quantised"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"mlp_bias": True}, "mlp_bias is true"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types contains 'sliding_attention'"),
        (
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "sliding-window attention is in use",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'; supported: 'default'"),
        ({"rope_parameters": ..., "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope_type 'llama3' lacks low_freq_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": "yarn"}, "rope_parameters is 'yarn', expected keys and values"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"vocab_size": "37"}, "vocab_size is '37', expected int"),
        ({"num_key_value_heads": 3}, "num_heads is 4; it must be a multiple of num_kv_heads 3"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small', expected float"),
        ({"vocab_size": 40}, "has shape (37, 16); config.json asks for (40, 16)"),
        ({"num_hidden_layers": 3}, "tensor model.layers.2.input_layernorm.weight is missing"),
        ({"num_hidden_layers": 1}, "which a llama3_2 model with 1 layers does not have"),
        ({"model_type": "qwen3", "head_dim": 4}, "tensor model.layers.0.self_attn.q_norm.weight is missing"),
    ],
)
def test_unsupported_config(single, changes, message):
    edit_config(single, **changes)
    assert message in refusal(single)


def test_window_that_no_layer_uses_is_accepted(single):
    edit_config(single, use_sliding_window=True, sliding_window=8, max_window_layers=2)
    assert read_spec(single).num_layers == 2


def test_defaults_of_transformers(single):
    edit_config(single, rope_parameters=..., rope_theta=..., rms_norm_eps=..., tie_word_embeddings=..., head_dim=...)
    edit_config(single, num_key_value_heads=None)
    spec = read_spec(single)
    assert (spec.rope_base, spec.rope_scaling, spec.norm_eps) == (10_000.0, None, 1e-6)
    assert (spec.tie_word_embeddings, spec.head_dim, spec.num_kv_heads) == (False, 4, 4)


def test_missing_shard(shards):
    victim = sorted(shards.glob("*.safetensors"))[1]
    victim.unlink()
    assert f"shard {victim.name}, named in model.safetensors.index.json, is missing" in refusal(
        shards, FileNotFoundError
    )
    (shards / "model.safetensors.index.json").unlink()
    assert f"shard {victim.name} is missing" in refusal(shards, FileNotFoundError)


@pytest.mark.parametrize("content", ["{", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_broken_index(shards, content):
    (shards / "model.safetensors.index.json").write_text(content)
    assert "is not valid JSON" in (line := refusal(shards)) or "is not a valid index with a weight_map" in line


def test_index_that_names_the_wrong_file(shards):
    path = shards / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    files = sorted(set(index["weight_map"].values()))
    other = next(file for file in files if file != index["weight_map"]["model.norm.weight"])
    index["weight_map"]["model.norm.weight"] = other
    path.write_text(json.dumps(index))
    assert f"tensor model.norm.weight is missing in {shards / other}" in refusal(shards)
    index["weight_map"]["model.norm.weight"] = "pytorch_model.bin"
    path.write_text(json.dumps(index))
    assert "only .safetensors files are read" in refusal(shards)


@pytest.mark.parametrize("with_index", [True, False])
def test_a_tensor_in_two_files(shards, with_index):
    """Which of the two counts would depend on the reader."""
    index = shards / "model.safetensors.index.json"
    file = json.loads(index.read_text())["weight_map"]["model.norm.weight"]
    other = next(path for path in sorted(shards.glob("*.safetensors")) if path.name != file)
    save_file(load_file(other) | {"model.norm.weight": torch.ones(16)}, other, metadata={"format": "pt"})
    if not with_index:
        index.unlink()
    message = refusal(shards)
    assert "tensor model.norm.weight is in two files" in message and file in message and other.name in message


def test_one_file_beside_an_index(shards, pristine_single):
    """transformers reads the one file, the index names the others."""
    shutil.copyfile(pristine_single / "model.safetensors", shards / "model.safetensors")
    assert "is in two files" in refusal(shards)


def test_an_index_that_does_not_name_all(shards):
    """A tensor that its files hold is read; one that no model has is refused."""
    path = shards / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    complete = load_teacher_state_dict(shards)
    file = shards / index["weight_map"].pop("model.norm.weight")
    path.write_text(json.dumps(index))
    assert torch.equal(load_teacher_state_dict(shards)["norm.scale"], complete["norm.scale"])
    save_file(load_file(file) | {"model.extra.weight": torch.ones(1)}, file, metadata={"format": "pt"})
    assert "holds model.extra.weight, which a llama3_2 model with 2 layers does not have" in refusal(shards)


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/elsewhere.safetensors", "sub/model.safetensors"])
def test_index_that_names_a_file_outside(shards, name):
    path = shards / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = name
    path.write_text(json.dumps(index))
    assert "only those beside it" in refusal(shards)


def test_no_weights_or_only_pickles(single):
    (single / "model.safetensors").unlink()
    assert "has no weights" in refusal(single, FileNotFoundError)
    (single / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    assert "has only pickled weights (pytorch_model.bin)" in refusal(single)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, 0.999])
def test_truncated_file(single, keep):
    path = single / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: keep if isinstance(keep, int) else int(keep * len(content))])
    assert "is truncated or not a safetensors file" in refusal(single)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_weights_are_named(single, value):
    def poison(tensor):
        tensor[-1, 3] = value
        return tensor

    edit_weights(single, model__layers__1__mlp__up_proj__weight=poison)
    assert "tensor model.layers.1.mlp.up_proj.weight in" in (message := refusal(single))
    assert "holds NaN or infinite values" in message


def test_overflow_in_conversion(single):
    edit_weights(single, model__norm__weight=lambda tensor: tensor * 1e6)
    assert load_teacher_state_dict(single)["norm.scale"].max() == 1e6
    with pytest.raises(ValueError, match=r"model.norm.weight in .* overflows when converted to torch.float16"):
        load_teacher_state_dict(single, dtype=torch.float16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__norm__weight": ...}, "tensor model.norm.weight is missing in"),
        ({"lm_head__weight": ...}, "tensor lm_head.weight is missing in"),
        ({"model__norm__weight": lambda _: torch.ones(17)}, "has shape (17,); config.json asks for (16,)"),
        ({"model__norm__weight": lambda _: torch.ones(16, dtype=torch.int8)}, "is stored as I8; allowed: F64, F32"),
        (
            {"model__layers__0__self_attn__q_proj__bias": lambda _: torch.ones(16)},
            "q_proj.bias, which a llama3_2 model",
        ),
    ],
)
def test_tensors_that_do_not_fit(single, changes, message):
    edit_weights(single, **changes)
    assert message in refusal(single)


def test_old_rotary_buffers_are_ignored(single):
    edit_weights(single, model__layers__0__self_attn__rotary_emb__inv_freq=lambda _: torch.ones(2))
    assert not any("rotary" in name for name in load_teacher_state_dict(single))


def test_tied_head_stored_once_more(single):
    edit_config(single, tie_word_embeddings=True)
    assert "lm_head.weight that differs from the embedding" in refusal(single)
    embedding = load_file(single / "model.safetensors")["model.embed_tokens.weight"]
    edit_weights(single, lm_head__weight=lambda _: embedding.clone())
    assert "output.weight" not in load_teacher_state_dict(single)


def test_headers_are_checked_before_weights_are_read(shards):
    # NaN in the first tensor, a wrong shape in the last: the header's fault is reported.
    files = sorted(shards.glob("*.safetensors"))
    for path, change in ((files[0], lambda t: t * float("nan")), (files[-1], lambda t: t[:1])):
        save_file({name: change(tensor).clone() for name, tensor in load_file(path).items()}, path)
    assert "config.json asks for" in refusal(shards)
