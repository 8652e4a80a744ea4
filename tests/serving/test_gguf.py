"""What llama.cpp's converter is given to read."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tcal_components.assets import asset_path
from tcal_components.export.verify import ExportError
from tcal_components.serving.gguf import converter_input, main, pre_tokenizer
from tcal_components.serving.llama3_rope import arrange
from tcal_components.serving.random_export import SPECS


def tensors_of(folder):
    files = {}
    for path in folder.glob("*.safetensors"):
        files |= load_file(path)
    return files


def test_an_export_without_biases_is_read_as_it_is(small_export, tmp_path):
    folder = small_export("qwen3")
    assert converter_input(folder, tmp_path, None) == folder and not list(tmp_path.iterdir())


@pytest.mark.parametrize("shard", ["5GB", "300KB"])
def test_zero_biases_of_the_output_projection_are_left_out(small_export, tmp_path, shard):
    folder = small_export("qwen2_5", max_shard_size=shard)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    read = converter_input(folder, tmp_path, None)
    kept, all_of_them = tensors_of(read), tensors_of(folder)
    left_out = set(all_of_them) - set(kept)
    assert left_out == {f"model.layers.{layer}.self_attn.o_proj.bias" for layer in (0, 2)}
    assert all(torch.equal(kept[name], all_of_them[name]) for name in kept)
    assert {path.name for path in read.iterdir()} == set(before)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    index = read / "model.safetensors.index.json"
    assert index.exists() == (shard != "5GB")
    if index.exists():
        assert set(json.loads(index.read_text())["weight_map"]) == set(kept)


def test_a_trained_bias_of_the_output_projection_is_refused(small_export, tmp_path):
    folder = small_export("llama3_2")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.self_attn.o_proj.bias"][5] = 0.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ExportError, match=r"layers\.2\.self_attn\.o_proj\.bias is not zero"):
        converter_input(folder, tmp_path, None)


def test_rope_scaling_is_given_as_the_engine_reads_it(small_export, tmp_path):
    folder, spec = small_export("llama3_2"), SPECS["llama3_2"]
    rope = arrange(spec.head_dim, spec.rope_base, spec.rope_scaling)
    config = json.loads((converter_input(folder, tmp_path, rope) / "config.json").read_text())
    assert config["rope_parameters"]["rope_type"] == "yarn" and config["rope_scaling"] is None
    assert config["partial_rotary_factor"] == 1.0 and config["rope_theta"] == spec.rope_base**2
    assert json.loads((folder / "config.json").read_text())["rope_parameters"]["rope_type"] == "llama3"


def test_tokenizers_that_split_as_gpt_2_are_known(tmp_path):
    assert pre_tokenizer(asset_path("quickstart")) == "gpt-2"
    tokenizer = json.loads((asset_path("quickstart") / "tokenizer.json").read_text())
    for other in (
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {"type": "ByteLevel", "use_regex": False}},
        {"pre_tokenizer": None},
        {"normalizer": {"type": "NFC"}},
    ):
        (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer | other))
        assert pre_tokenizer(tmp_path) is None


def test_the_command_refuses_in_one_line(small_export, tmp_path):
    given = ["--export", str(small_export("qwen3", retained_layers=())), "--output", str(tmp_path / "f32.gguf")]
    with pytest.raises(SystemExit) as end:
        main([*given, "--source", str(tmp_path)])
    assert end.value.code == 2
    (tmp_path / "convert_hf_to_gguf.py").touch()
    with pytest.raises(SystemExit, match="all or no layers keep attention"):
        main([*given, "--source", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["convert_hf_to_gguf.py"]
