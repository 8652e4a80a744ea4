"""Exports of random hybrids of every family, loaded by plain transformers."""

import json
import re
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tcal_components.export.config_json import dropped_features, export_layout
from tcal_components.export.engines import tensor_parallel_sizes
from tcal_components.export.folder import export_hybrid, parse_size
from tcal_components.export.norms import constant_dimension, join_norm, split_norm
from tcal_components.export.notes import serving_notes
from tcal_components.export.verify import ExportError, verify_export
from tcal_components.modules.spec import GatedDeltaNetSpec

TOKENS = torch.randint(0, 61, (2, 75), generator=torch.Generator().manual_seed(3))


def export(student, teacher_folder, output_dir, **options):
    options = {"dtype": torch.float32} | options
    return export_hybrid(
        student.state_dict(),
        spec=student.spec,
        gdn=student.gdn,
        retained_layers=student.retained_layers,
        teacher_dir=teacher_folder,
        output_dir=output_dir,
        **options,
    )


CASES = [
    # family, changes of the teacher, retained layers, gdn
    ("qwen3", {}, (1, 3), {}),
    ("qwen3", {"tie_word_embeddings": True, "num_kv_heads": 4, "qkv_bias": True}, (0,), {"key_head_dim": 32}),
    ("qwen3", {"head_dim": 8}, (), {"conv_size": 0}),
    ("qwen2_5", {}, (1, 2), {"value_head_dim": 24}),
    ("qwen2_5", {"tie_word_embeddings": True, "num_kv_heads": 1}, (0, 1, 2, 3), {}),
    ("llama3_2", {"tie_word_embeddings": True}, (2,), {}),
    ("llama3_2", {"rope_scaling": None, "head_dim": 64, "num_heads": 3, "num_kv_heads": 3}, (0, 3), {"conv_size": 2}),
    ("llama3_2", {"head_dim": 128, "num_heads": 2, "num_kv_heads": 1}, (1,), {"key_head_dim": 256}),
]


@pytest.mark.parametrize(("family", "changes", "retained", "gdn"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_export_is_the_student(
    family, changes, retained, gdn, dtype, tiny_spec, random_hybrid, teacher_folder, tmp_path
):
    student = random_hybrid(tiny_spec(family, **changes), retained, GatedDeltaNetSpec(**gdn))
    before = {name: value.clone() for name, value in student.state_dict().items()}
    info = export(student, teacher_folder, tmp_path / "export", dtype=dtype)
    result = verify_export(tmp_path / "export", student, TOKENS)
    assert result["ok"] and result["greedy_equal"] and result["weights_equal"]
    assert result["reference_logit_max"] > 3.0
    for name in ("max_abs_logit_diff", "cached_max_abs_diff", "left_padded_max_abs_diff"):
        if name == "cached_max_abs_diff" and len(retained) in (0, 4):
            assert result[name] is None  # transformers has no cache where all layers are of one kind
            continue
        assert result[name] < 2e-5 * result["reference_logit_max"], name
    assert info.parameters == sum(value.numel() for value in student.parameters())
    assert info.shards == 1 and info.retained_layers == retained
    assert all(torch.equal(value, before[name]) for name, value in student.state_dict().items())
    with safe_open(tmp_path / "export" / "model.safetensors", "pt") as file:
        names = set(file.keys())
        kinds = {name: file.get_slice(name).get_dtype() for name in names}
    assert ("lm_head.weight" in names) != student.spec.tie_word_embeddings
    assert all(kind == "F32" for name, kind in kinds.items() if name.endswith("A_log"))


@pytest.mark.parametrize("pad_values", [True, False])
def test_values_padded_to_the_key_size(pad_values, tiny_spec, random_hybrid, teacher_folder, tmp_path):
    """Keys of twice the values' size, as configs/smollm2_135m.yaml has them: one head size in the export, nothing rounded."""
    student = random_hybrid(tiny_spec("llama3_2", norm_eps=1e-3), (1, 3), GatedDeltaNetSpec(key_head_dim=32))
    export(student, teacher_folder, tmp_path / "export", pad_values=pad_values)
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert (config["linear_key_head_dim"], config["linear_value_head_dim"]) == (32, 32 if pad_values else 16)
    result = verify_export(tmp_path / "export", student, TOKENS)
    assert result["max_abs_logit_diff"] < 2e-5 * result["reference_logit_max"]


def test_generation_without_attention_layers(tiny_spec, random_hybrid, teacher_folder, tmp_path):
    from transformers import AutoModelForCausalLM

    export(random_hybrid(tiny_spec("qwen3"), ()), teacher_folder, tmp_path / "export")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    assert model.generate(TOKENS[:, :9], max_new_tokens=4, min_new_tokens=4, do_sample=False).shape == (2, 13)


@pytest.mark.parametrize("family", ["qwen3", "llama3_2"])
def test_generation_with_and_without_cache(family, tiny_spec, random_hybrid, teacher_folder, tmp_path):
    from transformers import AutoModelForCausalLM

    export(random_hybrid(tiny_spec(family)), teacher_folder, tmp_path / "export")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    for beams in (1, 3):
        texts = [
            model.generate(TOKENS[:, :9], max_new_tokens=8, do_sample=False, num_beams=beams, use_cache=use_cache)
            for use_cache in (True, False)
        ]
        assert torch.equal(*texts)


def test_bf16_model_is_close_to_the_student(tiny_spec, random_hybrid, teacher_folder, tmp_path):
    """Loaded as users load it, in bf16: the constants of the attention cost no accuracy beyond bf16's own."""
    from transformers import AutoModelForCausalLM

    student = random_hybrid(tiny_spec("llama3_2"), retained_layers=(0, 1, 2, 3))
    export(student, teacher_folder, tmp_path / "export", dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype="auto")
    assert model.dtype == torch.bfloat16
    with torch.no_grad():
        exact = student(TOKENS)
        exported = (model(TOKENS).logits.float() - exact).norm() / exact.norm()
        own = (student.to(torch.bfloat16)(TOKENS).float() - exact).norm() / exact.norm()
    assert exported < 1.5 * own < 0.1


def test_shards_with_index(tiny_spec, random_hybrid, teacher_folder, tmp_path):
    student = random_hybrid(tiny_spec("qwen2_5"))
    info = export(student, teacher_folder, tmp_path / "export", max_shard_size="20KB")
    index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "export").glob("*.safetensors"))
    assert len(files) == info.shards > 3 and {path.name for path in files} == set(index["weight_map"].values())
    tensors = {name: path for path in files for name in load_file(path)}
    assert {name: path.name for name, path in tensors.items()} == index["weight_map"]
    size = sum(value.numel() * value.element_size() for path in files for value in load_file(path).values())
    assert index["metadata"]["total_size"] == info.bytes == size
    assert verify_export(tmp_path / "export", student, TOKENS)["ok"]


def test_config_has_the_keys_of_every_reader(tiny_spec, random_hybrid, teacher_folder, tmp_path):
    student = random_hybrid(tiny_spec("llama3_2"))
    export(student, teacher_folder, tmp_path / "export", dtype=torch.bfloat16)
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["model_type"] == "qwen3_5_text" and config["architectures"] == ["Qwen3_5ForCausalLM"]
    assert config["head_dim"] == 32 and config["partial_rotary_factor"] == 0.5
    assert config["rope_parameters"]["partial_rotary_factor"] == 0.5
    assert config["rope_parameters"]["rope_type"] == "llama3" == config["rope_scaling"]["rope_type"]
    assert config["rope_parameters"]["factor"] == 32.0 and config["rope_theta"] == 10_000.0
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert config["attention_bias"] is config["qkv_bias"] is config["attn_output_gate"] is True
    assert config["full_attention_interval"] == 2 and config["mamba_ssm_dtype"] == "float32"
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, [2, 3], 0)
    assert json.loads((tmp_path / "export" / "generation_config.json").read_text())["eos_token_id"] == [2, 3]
    modes = {
        path.stat().st_mode for path in (tmp_path / "export").iterdir() if path.suffix in (".json", ".safetensors")
    }
    assert len(modes) == 1
    for name in ("tokenizer.json", "tokenizer_config.json", "LICENSE"):
        assert (tmp_path / "export" / name).read_bytes() == (teacher_folder / name).read_bytes()


@pytest.mark.parametrize("tokenizer_class", ["GPT2Tokenizer", "PreTrainedTokenizerFast", "Qwen2Tokenizer"])
def test_tokenizer_classes_of_the_teachers(tokenizer_class, tiny_spec, random_hybrid, teacher_folder, tmp_path):
    (teacher_folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": tokenizer_class}))
    export(random_hybrid(tiny_spec("qwen3")), teacher_folder, tmp_path / "export")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert tokenizer.decode(tokenizer("one two", add_special_tokens=False)["input_ids"]) == "one two"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("model.layers.0.linear_attn.out_proj.weight", 0.02),
        ("model.layers.1.self_attn.q_proj.weight", 0.05),
        ("model.embed_tokens.weight", 1e-7),
    ],
)
def test_refuses_a_changed_export(name, change, tiny_spec, random_hybrid, teacher_folder, tmp_path):
    student = random_hybrid(tiny_spec("qwen2_5"))
    export(student, teacher_folder, tmp_path / "export")
    path = tmp_path / "export" / "model.safetensors"
    tensors = load_file(path)
    tensors[name][0] += change
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(ExportError, match=f"{name} differs from the student's weights"):
        verify_export(tmp_path / "export", student, TOKENS)
    result = verify_export(tmp_path / "export", student, TOKENS, strict=False)
    assert not result["ok"] and not result["weights_equal"]
    assert (result["max_abs_logit_diff"] > result["tolerance"]) == (change > 1e-3)


def test_refuses_a_wrong_computation(tiny_spec, random_hybrid, teacher_folder, tmp_path):
    """Right weights under a wrong config: only the logits can tell."""
    student = random_hybrid(tiny_spec("llama3_2"))
    export(student, teacher_folder, tmp_path / "export")
    path = tmp_path / "export" / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"]["factor"] = config["rope_scaling"]["factor"] = 8.0
    path.write_text(json.dumps(config))
    with pytest.raises(ExportError, match="max_abs_logit_diff is"):
        verify_export(tmp_path / "export", student, TOKENS)


def test_refuses_text_too_short_to_compare(tiny_spec, random_hybrid, teacher_folder, tmp_path):
    student = random_hybrid(tiny_spec("qwen3"))
    export(student, teacher_folder, tmp_path / "export")
    with pytest.raises(ValueError, match=r"shape \(2, 7\); the check needs \[batch, length\] of length 8 or more"):
        verify_export(tmp_path / "export", student, TOKENS[:, :7])
    assert verify_export(tmp_path / "export", student, TOKENS[:, :8])["ok"]


def test_refuses_another_eps(tiny_spec, random_hybrid, teacher_folder, tmp_path):
    student = random_hybrid(tiny_spec("qwen3"))
    export(student, teacher_folder, tmp_path / "export")
    student.layers[0].attn.o_norm.eps = 1e-5
    with pytest.raises(ValueError, match="o_norm has eps 1e-05; an export has one eps for all norms, 1e-06"):
        verify_export(tmp_path / "export", student, TOKENS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "gguf"}, "export.format is 'gguf'; allowed: qwen3_5_text, hf_custom"),
        ({"dtype": torch.float16}, "allowed: bf16 and fp32"),
        ({"max_shard_size": "lots"}, "max_shard_size is 'lots'"),
        ({"max_shard_size": 0}, "max_shard_size is 0"),
        ({"gdn": GatedDeltaNetSpec(conv_size=5)}, "gdn.conv_size is 5; an export holds convolutions of width 0 to 4"),
        ({"gdn": GatedDeltaNetSpec(key_head_dim=512)}, "gdn.key_head_dim is 512"),
        ({"retained_layers": (0,)}, "does not fit its specification"),
        ({"teacher_dir": "nowhere"}, "nowhere does not exist"),
        ({"eos_token_id": [2, 61]}, "config.json: eos_token_id is [2, 61]; the embedding has rows for the ids 0 to 60"),
        ({"pad_token_id": "0"}, "config.json: pad_token_id is '0'; the embedding has rows for the ids 0 to 60"),
    ],
)
def test_mistakes_are_one_line(options, message, tiny_spec, random_hybrid, teacher_folder, tmp_path):
    student = random_hybrid(tiny_spec("qwen3"))
    named = {key: options[key] for key in options if key.endswith("_token_id")}
    (teacher_folder / "config.json").write_text(json.dumps({"bos_token_id": -1} | named))  # -1: none, in older files
    arguments = {
        "spec": student.spec,
        "gdn": student.gdn,
        "retained_layers": student.retained_layers,
        "teacher_dir": teacher_folder,
        "output_dir": tmp_path / "export",
    } | {key: value for key, value in options.items() if key not in named}
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(message)) as error:
        export_hybrid(student.state_dict(), **arguments)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "export").exists()


def test_nothing_half_written(tiny_spec, random_hybrid, teacher_folder, tmp_path):
    student = random_hybrid(tiny_spec("qwen3"))
    target = tmp_path / "out" / "export"
    export(student, teacher_folder, target)
    files = {path.name: path.read_bytes() for path in target.iterdir()}
    with torch.no_grad():
        student.norm.scale[0] = float("nan")
    with pytest.raises(ValueError, match="norm.scale has values that are not finite"):
        export(student, teacher_folder, target)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == files
    assert [path.name for path in target.parent.iterdir()] == ["export"]
    with torch.no_grad():
        student.norm.scale[0] = 2.0
    export(student, teacher_folder, target)
    assert verify_export(target, student, TOKENS)["ok"]
    with pytest.raises(ValueError, match="exists and is not an earlier export"):
        export(student, teacher_folder, teacher_folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_split_is_idempotent(dtype):
    torch.manual_seed(0)
    special = torch.tensor([0.0, 1.0, 0.5, -0.5, 0.49999, -0.99999, 2.0, -3.0, 100.3])
    weight = torch.cat([torch.randn(5000) * 0.5, torch.rand(5000) * 3, special])
    stored, factor = split_norm(weight, dtype=dtype, fold=True)
    again = split_norm(join_norm(stored, factor), dtype=dtype, fold=True)
    assert torch.equal(stored, again[0]) and torch.equal(factor, again[1])
    error = (join_norm(stored, factor) - weight).abs()
    assert bool((error <= weight.abs() * (0.0 if dtype == torch.float32 else 2.0**-8)).all())


@pytest.mark.parametrize("head_dim", [8, 16, 64, 80, 96, 128, 256])
def test_constants_are_exact_in_bf16(head_dim):
    numbers = constant_dimension(head_dim)
    assert all(float(torch.tensor(number, dtype=torch.bfloat16)) == number for number in numbers)
    scale = numbers.q_weight * numbers.k_weight / (numbers.q_bias * numbers.k_bias)
    assert scale * head_dim * 2**0.5 == pytest.approx(1.0, abs=6e-8)


def test_sizes():
    assert [parse_size(size) for size in ("5GB", "200 mb", "1KiB", 77, "12")] == [5 * 10**9, 2 * 10**8, 1024, 77, 12]


def test_notes(tiny_spec, random_hybrid, teacher_folder, tmp_path):
    def notes(info, serving=None):
        return " ".join(serving_notes(info, serving))

    regular = export(random_hybrid(tiny_spec("qwen3")), teacher_folder, tmp_path / "a")
    assert regular.full_attention_interval == 2
    assert "SGLang 0.5.23: usable, every 2-th layer keeps attention" in notes(regular)
    assert "one of 1, 2, 4 (4 heads" in notes(regular) and "--dtype" not in notes(regular).replace("DIR,dtype", "")
    assert "not run on this one" in notes(regular) and "Make its files" not in notes(regular)
    irregular = export(random_hybrid(tiny_spec("qwen3"), (0, 3)), teacher_folder, tmp_path / "b")
    assert irregular.full_attention_interval is None
    assert "not usable, it knows attention in exactly every n-th layer" in notes(irregular)
    biased = export(random_hybrid(tiny_spec("qwen2_5")), teacher_folder, tmp_path / "c")
    assert biased.extra_biases and "head size 32 instead of 16" in notes(biased)
    assert "zero biases that the engine refuses" in notes(biased) and "RoPE scaling" not in notes(biased)
    assert "--dtype bfloat16" in notes(biased) and "drops the q/k/v biases" in notes(biased)
    scaled = export(random_hybrid(tiny_spec("llama3_2")), teacher_folder, tmp_path / "d")
    assert "drops the RoPE scaling without a word" in notes(scaled)
    whole = export(random_hybrid(tiny_spec("qwen3"), ()), teacher_folder, tmp_path / "e")
    assert "use_cache is false" in notes(whole) and "llama.cpp: not served" in notes(whole)
    measured = {"version": "9", "max_abs_logit_diff": 0.0123, "reference_logit_max": 21.0}
    measured["perplexity"] = {"student": 11.111, "q8_0": 11.222}
    assert "llama.cpp 9: run on this export; logits differ by at most 0.012 at logits up to 21" in notes(
        regular, {"llama_cpp": measured}
    )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "sizes"),
    [(9, 3, [1, 3, 9]), (32, 8, [1, 2, 4, 8, 16]), (14, 2, [1, 2, 14]), (6, 2, [1, 2, 6])],
)
def test_tensor_parallel_sizes(tiny_spec, heads, kv_heads, sizes):
    spec = tiny_spec("qwen3", num_heads=heads, num_kv_heads=kv_heads)
    spec = replace(spec, intermediate_dim=5040 * 16)
    layout = export_layout(
        spec, gdn=GatedDeltaNetSpec(), retained_layers=(1,), format="qwen3_5_text", dtype=torch.bfloat16
    )
    assert tensor_parallel_sizes(layout) == sizes


def test_what_a_teacher_loses(tiny_spec):
    assert dropped_features(tiny_spec("qwen2_5")) == ["RoPE on q and k", "q, k and v biases"]
    assert len(dropped_features(tiny_spec("qwen3"))) == 2
