"""An exported folder is a checkpoint: it is read back, exported again and trained further."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tcal_components.export.checkpointer import HybridCheckpointer
from tcal_components.export.folder import export_hybrid
from tcal_components.export.import_hybrid import hybrid_from_export, import_hybrid
from tcal_components.export.notes import serving_notes
from tcal_components.export.verify import verify_export
from tcal_components.modules.spec import GatedDeltaNetSpec

CASES = [
    ("qwen3", {}, (1, 3), {}),
    ("qwen3", {"tie_word_embeddings": True}, (), {"conv_size": 0, "key_head_dim": 32}),
    ("qwen2_5", {"tie_word_embeddings": True}, (0, 2), {"conv_size": 3}),
    ("qwen2_5", {"num_kv_heads": 1}, (1, 2), {}),
    ("llama3_2", {}, (0, 1, 2, 3), {"value_head_dim": 24}),
    ("llama3_2", {}, (1,), {"key_head_dim": 48}),  # the export holds each value head three times
]


def export(state_dict, spec, gdn, retained_layers, teacher_folder, output_dir, **options):
    return export_hybrid(
        state_dict,
        spec=spec,
        gdn=gdn,
        retained_layers=retained_layers,
        teacher_dir=teacher_folder,
        output_dir=output_dir,
        **options,
    )


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(("family", "changes", "retained", "gdn"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shard", ["5GB", "30KB"])
def test_round_trip(family, changes, retained, gdn, dtype, shard, tiny_spec, random_hybrid, teacher_folder, tmp_path):
    student = random_hybrid(tiny_spec(family, **changes), retained, GatedDeltaNetSpec(**gdn))
    original = student.state_dict()
    options = {"dtype": dtype, "max_shard_size": shard}
    export(original, student.spec, student.gdn, retained, teacher_folder, tmp_path / "a", **options)
    state_dict, spec, gdn_spec, kept = import_hybrid(tmp_path / "a")
    assert (spec, gdn_spec, kept) == (student.spec, student.gdn, retained)
    assert list(state_dict) == [key for key in state_dict if key in original] and set(state_dict) == set(original)
    if dtype == torch.float32:
        assert all(torch.equal(state_dict[key], value) for key, value in original.items())
    else:
        for key, value in original.items():
            assert torch.allclose(state_dict[key].float(), value, rtol=2.0**-7, atol=2.0**-8 if "norm" in key else 0)
    export(state_dict, spec, gdn_spec, kept, tmp_path / "a", tmp_path / "b", **options)
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_builder_and_dtype(tiny_spec, random_hybrid, teacher_folder, tmp_path):
    student = random_hybrid(tiny_spec("llama3_2"))
    export(student.state_dict(), student.spec, student.gdn, (1, 3), teacher_folder, tmp_path / "a", dtype=torch.float32)
    model = hybrid_from_export(checkpoint_dir=tmp_path / "a")
    model.load_state_dict(import_hybrid(tmp_path / "a").state_dict)
    tokens = torch.arange(12)[None]
    assert torch.equal(model.eval()(tokens), student(tokens))
    assert hybrid_from_export(checkpoint_dir=tmp_path / "a", max_seq_len=99).max_seq_len == 99
    half = import_hybrid(tmp_path / "a", dtype=torch.bfloat16).state_dict
    assert {value.dtype for value in half.values()} == {torch.bfloat16}


def test_trained_in_transformers(tiny_spec, random_hybrid, teacher_folder, tmp_path):
    """Weights saved by transformers, without the record of the norms, still give the same model."""
    from transformers import AutoModelForCausalLM

    student = random_hybrid(tiny_spec("qwen2_5"))
    export(student.state_dict(), student.spec, student.gdn, (1, 3), teacher_folder, tmp_path / "a", dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    model.save_pretrained(tmp_path / "b")
    tokens = torch.arange(30)[None]
    again = hybrid_from_export(checkpoint_dir=tmp_path / "b").eval()
    again.load_state_dict(import_hybrid(tmp_path / "b").state_dict)
    with torch.no_grad():
        expected = model(tokens).logits
        assert (again(tokens) - expected).abs().max() < 2e-5 * expected.abs().max()
        assert (student(tokens) - expected).abs().max() > 0.05
        model.model.layers[1].self_attn.q_norm.weight[0] *= 1.1
    model.save_pretrained(tmp_path / "c")
    with pytest.raises(ValueError, match=r"layers.1.self_attn.\* no longer has the form"):
        import_hybrid(tmp_path / "c")


def test_padded_values_trained_in_transformers(tiny_spec, random_hybrid, teacher_folder, tmp_path):
    """Training reaches the copies of the values through the norm; then they belong to the student."""
    from transformers import AutoModelForCausalLM

    gdn = GatedDeltaNetSpec(key_head_dim=32)
    student = random_hybrid(tiny_spec("qwen3"), (1, 3), gdn)
    export(student.state_dict(), student.spec, gdn, (1, 3), teacher_folder, tmp_path / "a", dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.float32)
    tokens = torch.randint(0, 61, (2, 30))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    model.save_pretrained(tmp_path / "b")
    with pytest.raises(ValueError, match="set value_head_dim in config.json's key 'tcal' to 32"):
        import_hybrid(tmp_path / "b")
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    config["tcal"]["value_head_dim"] = 32
    (tmp_path / "b" / "config.json").write_text(json.dumps(config))
    with torch.no_grad():  # the gate rows of the retained layers are the export's too
        for layer in (1, 3):
            weight = model.model.layers[layer].self_attn.q_proj.weight
            weight.unflatten(0, (-1, 32))[:, 16:] = 0
    config_before = json.loads((tmp_path / "b" / "config.json").read_text())
    model.save_pretrained(tmp_path / "b")
    (tmp_path / "b" / "config.json").write_text(json.dumps(config_before))
    again = hybrid_from_export(checkpoint_dir=tmp_path / "b").eval()
    again.load_state_dict(import_hybrid(tmp_path / "b").state_dict)
    with torch.no_grad():
        expected = model(tokens).logits
        assert (again(tokens) - expected).abs().max() < 2e-5 * expected.abs().max()


def test_checkpointer_continues(tiny_spec, random_hybrid, teacher_folder, tmp_path):
    student = random_hybrid(tiny_spec("qwen3"))
    state_dict = student.state_dict()
    start, output = tmp_path / "a", tmp_path / "run"
    export(state_dict, student.spec, student.gdn, (1, 3), teacher_folder, start, dtype=torch.float32)
    checkpointer = HybridCheckpointer(start, output_dir=output, model_type="QWEN2", checkpoint_files=["ignored"])
    loaded = checkpointer.load_checkpoint()
    assert set(loaded) == {"model"} and all(torch.equal(loaded["model"][k], v) for k, v in state_dict.items())
    with pytest.raises(FileNotFoundError, match="nothing to resume from"):
        HybridCheckpointer(start, output_dir=output, should_load_recipe_state=True).load_checkpoint()
    for epoch in range(2):
        trained = {key: value + epoch + 1 for key, value in state_dict.items()}
        state = {"model": trained, "epochs_run": epoch + 1, "optimizer": {"state": {0: torch.ones(2)}}}
        checkpointer.save_checkpoint(state, epoch=epoch, intermediate_checkpoint=True)
    resumed = HybridCheckpointer(start, output_dir=output, should_load_recipe_state=True).load_checkpoint()
    assert resumed["epochs_run"] == 2 and torch.equal(resumed["optimizer"]["state"][0], torch.ones(2))
    assert all(torch.equal(resumed["model"][key], value) for key, value in trained.items())
    assert (output / "epoch_1" / "tokenizer.json").read_bytes() == (teacher_folder / "tokenizer.json").read_bytes()
    with pytest.raises(ValueError, match="has no adapters"):
        checkpointer.save_checkpoint({}, epoch=0, adapter_only=True)
    with pytest.raises(ValueError, match="lies in checkpoint_dir"):
        HybridCheckpointer(start, output_dir=start / "run")
    with pytest.raises(ValueError, match="checkpointer.dtype is 'int8'; allowed: fp32, bf16"):
        HybridCheckpointer(start, dtype="int8")


def test_damaged_folders_are_refused(tiny_spec, random_hybrid, teacher_folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="an exported hybrid is needed"):
        import_hybrid(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="has no key 'tcal'"):
        import_hybrid(teacher_folder)
    student = random_hybrid(tiny_spec("qwen2_5"))
    folder = tmp_path / "a"
    export(student.state_dict(), student.spec, student.gdn, (1, 3), teacher_folder, folder, max_shard_size="30KB")
    shard = (
        folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]["model.norm.weight"]
    )
    content = shard.read_bytes()
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=f"shard {shard.name}"):
        import_hybrid(folder)
    shard.write_bytes(content)
    tensors = load_file(shard)
    save_file({name: value for name, value in tensors.items() if name != "model.norm.weight"}, shard)
    with pytest.raises(ValueError, match="tensor model.norm.weight is missing in"):
        import_hybrid(folder)
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"][:-1]}, shard)
    with pytest.raises(ValueError, match=r"model.norm.weight in .* has shape \(31,\)"):
        import_hybrid(folder)


@pytest.mark.parametrize(("family", "heads"), [("qwen3", 2), ("llama3_2", 2), ("qwen2_5", 1), ("qwen2_5", 4)])
def test_biases_survive(family, heads, tiny_spec, random_hybrid, teacher_folder, tmp_path):
    """Whatever the number of key/value heads, in both formats: with one head a slice of the biases is a view."""
    student = random_hybrid(tiny_spec(family, num_kv_heads=heads))
    original = student.state_dict()
    for format in ("qwen3_5_text", "hf_custom"):
        options = {"dtype": torch.float32, "format": format}
        export(original, student.spec, student.gdn, (1, 3), teacher_folder, tmp_path / format, **options)
        state_dict = import_hybrid(tmp_path / format).state_dict
        assert state_dict.keys() == original.keys()
        assert all(torch.equal(state_dict[key], value) for key, value in original.items())


def test_values_outside_the_range_are_refused(tiny_spec, random_hybrid, teacher_folder, tmp_path):
    """On the way out and on the way in; none becomes an infinity without a word."""
    student = random_hybrid(tiny_spec("qwen2_5"))
    largest = torch.finfo(torch.bfloat16).max
    for key, value in (("layers.0.mlp.w1.weight", 1e300), ("layers.1.attn.output_proj.weight", largest)):
        weights = {name: tensor.double() for name, tensor in student.state_dict().items()}
        weights[key][0, 0] = value  # what the stock class needs of an output projection is twice as large
        for dtype in (torch.bfloat16, torch.float32) if value > largest else (torch.bfloat16,):
            with pytest.raises(ValueError, match=f"{key} has values that are not finite in {dtype}"):
                export(weights, student.spec, student.gdn, (1, 3), teacher_folder, tmp_path / "a", dtype=dtype)
    with torch.no_grad():
        student.layers[0].mlp.w1.weight[0, 0] = 1e5
    export(student.state_dict(), student.spec, student.gdn, (1, 3), teacher_folder, tmp_path / "a", dtype=torch.float32)
    assert import_hybrid(tmp_path / "a", dtype=torch.bfloat16).state_dict["layers.0.mlp.w1.weight"][0, 0] > 9e4
    with pytest.raises(ValueError, match="layers.0.mlp.w1.weight overflows when converted to torch.float16"):
        import_hybrid(tmp_path / "a", dtype=torch.float16)
    path = tmp_path / "a" / "model.safetensors"
    tensors = load_file(path)
    wide = tensors["model.layers.0.mlp.up_proj.weight"].double()
    save_file(tensors | {"model.layers.0.mlp.up_proj.weight": wide}, path)
    assert import_hybrid(tmp_path / "a").state_dict["layers.0.mlp.w3.weight"].dtype == torch.float32
    wide[0, 0] = 1e39
    save_file(tensors | {"model.layers.0.mlp.up_proj.weight": wide}, path)
    with pytest.raises(ValueError, match=r"outside the range of torch.float32 in layers.0.mlp.w3.weight"):
        import_hybrid(tmp_path / "a")
    save_file(tensors | {"model.layers.0.mlp.up_proj.weight": wide.to(torch.int8)}, path)
    with pytest.raises(ValueError, match="is stored as I8; allowed: F64, F32, F16, BF16"):
        import_hybrid(tmp_path / "a")


@pytest.mark.parametrize("family", ["qwen3", "llama3_2"])
def test_custom_format(family, tiny_spec, random_hybrid, teacher_folder, tmp_path, monkeypatch):
    """The folder's own class: heads keep their size, and the folder is read back like any other."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    student = random_hybrid(tiny_spec(family))
    options = {"dtype": torch.bfloat16, "format": "hf_custom"}
    info = export(student.state_dict(), student.spec, student.gdn, (1, 3), teacher_folder, tmp_path / "a", **options)
    assert info.exported_head_dim == 16 and not info.extra_biases
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["head_dim"] == 16 and "TcalHybridForCausalLM" in config["auto_map"]["AutoModelForCausalLM"]
    result = verify_export(tmp_path / "a", student, torch.randint(0, 61, (2, 40)))
    assert result["ok"] and result["max_abs_logit_diff"] < 2e-5 * result["reference_logit_max"]
    state_dict, spec, gdn_spec, kept = import_hybrid(tmp_path / "a")
    export(state_dict, spec, gdn_spec, kept, tmp_path / "a", tmp_path / "b", **options)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert "trust_remote_code" in " ".join(serving_notes(info))
