"""The check of an export refuses what no student computes: each fault here shows in one of its parts alone."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tcal_components.export.folder import export_hybrid
from tcal_components.export.import_hybrid import import_hybrid
from tcal_components.export.verify import ExportError, verify_export

TOKENS = torch.randint(0, 61, (2, 40), generator=torch.Generator().manual_seed(3))
PARTS = ("max_abs_logit_diff", "cached_max_abs_diff", "left_padded_max_abs_diff")
FORMATS = ("qwen3_5_text", "hf_custom")


@pytest.fixture(autouse=True)
def own_modules(tmp_path, monkeypatch):
    """Modeling files of a folder are copied by transformers before they are imported: here and not into the home."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))


@pytest.fixture
def export(tiny_spec, random_hybrid, teacher_folder, tmp_path):
    """Exports a random student of a family in float32: ``export(family, format, retained, **changes)``."""

    def make(family, format="qwen3_5_text", retained=(1, 3), **changes):
        student = random_hybrid(tiny_spec(family, **changes), retained)
        export_hybrid(
            student.state_dict(),
            spec=student.spec,
            gdn=student.gdn,
            retained_layers=retained,
            teacher_dir=teacher_folder,
            output_dir=tmp_path / "export",
            dtype=torch.float32,
            format=format,
        )
        return student, tmp_path / "export"

    return make


def edit_tensors(folder, change):
    path = folder / "model.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata=metadata)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("retained", [(1, 3), (), (0, 1, 2, 3)], ids=["some", "none", "all"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2_5", "llama3_2"])
def test_every_tensor_of_the_class_is_there(family, retained, tied, format, export):
    """No tensor is missing but a tied head, so it does not matter what memory held: here NaN."""
    from transformers import AutoConfig, AutoModelForCausalLM

    student, folder = export(family, format, retained, tie_word_embeddings=tied)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=True).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
        stored = load_file(folder / "model.safetensors")
        assert set(stored) == set(model.state_dict()) - ({"lm_head.weight"} if tied else set())
        model.load_state_dict(stored, strict=False)
        model.tie_weights()
        expected = student(TOKENS)
        assert (model(TOKENS, use_cache=False).logits - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.o_proj.bias", "model.layers.0.linear_attn.dt_bias", "model.norm.weight"]
)
def test_refuses_a_missing_tensor(name, format, export):
    student, folder = export("qwen2_5", format)
    edit_tensors(folder, lambda tensors: tensors.pop(name))
    if format == "hf_custom":  # a class can tell the loader to say nothing
        path = folder / "modeling_tcal_hybrid.py"
        path.write_text(path.read_text() + '\n    _keys_to_ignore_on_load_missing = [r".*"]\n')
    with pytest.raises(ExportError, match=f"1 tensors are missing for .*ForCausalLM \\(first: {name}\\)"):
        verify_export(folder, student, TOKENS)


@pytest.mark.parametrize(
    ("name", "tied"),
    [("lm_head.weight", True), ("lm_head.bias", False), ("model.layers.1.self_attn.gate.bias", False)],
)
def test_refuses_an_unexpected_tensor(name, tied, export):
    student, folder = export("llama3_2", tie_word_embeddings=tied)
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.ones(61, 32)}))
    with pytest.raises(ExportError, match=f"1 tensors are unexpected for Qwen3_5ForCausalLM \\(first: {name}\\)"):
        verify_export(folder, student, TOKENS)


# What the class in the folder does otherwise, and the one part of the check that can see it. Logits are scaled, which
# leaves the greedy text as it is.
FORWARD = """
    def forward(self, input_ids=None, attention_mask=None, use_cache=None, **kwargs):
        out = super().forward(input_ids=input_ids, attention_mask=attention_mask, use_cache=use_cache, **kwargs)
        if {condition}:
            out.logits = out.logits * {scale}
        return out
"""
GREEDY = """
    def generate(self, input_ids=None, **kwargs):
        out = super().generate(input_ids=input_ids, **kwargs)
        out[:, {position}] = (out[:, {position}] + 1) % self.vocab_size
        return out
"""
SHORT = """
    def generate(self, input_ids=None, **kwargs):
        return super().generate(input_ids=input_ids, **kwargs)[:, :-1]
"""
FAULTS = {
    "without cache": (FORWARD.format(condition="not use_cache and attention_mask is None", scale=1.01), PARTS[0]),
    "prefill": (
        FORWARD.format(condition="use_cache and attention_mask is None and input_ids.shape[1] > 1", scale=1.01),
        PARTS[1],
    ),
    "steps": (
        FORWARD.format(condition="use_cache and attention_mask is None and input_ids.shape[1] == 1", scale=1.01),
        PARTS[1],
    ),
    "padding": (
        FORWARD.format(
            condition="attention_mask is not None",
            scale="(1 + 0.01 * (attention_mask == 0).any(-1)[:, None, None])",  # the padded rows of a batch
        ),
        PARTS[2],
    ),
    "text": (GREEDY.format(position=-4), "greedy text differs"),
    "last of the text": (GREEDY.format(position=-1), "greedy text differs"),
    "length of the text": (SHORT, "greedy text differs"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_refuses_a_fault_that_one_part_alone_can_see(fault, export):
    source, message = FAULTS[fault]
    student, folder = export("llama3_2", "hf_custom")
    assert verify_export(folder, student, TOKENS)["ok"]
    path = folder / "modeling_tcal_hybrid.py"
    path.write_text(path.read_text() + source)
    result = verify_export(folder, student, TOKENS, strict=False)
    assert not result["ok"] and len(result["problems"]) == 1 and result["problems"][0].startswith(message)
    with pytest.raises(ExportError, match=f"does not reproduce the student: {message}"):
        verify_export(folder, student, TOKENS)


def test_refuses_another_tokenizer_class(export):
    student, folder = export("qwen3")
    assert verify_export(folder, student, TOKENS)["tokenizer_equal"]
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["normalizer"] = {"type": "Lowercase"}
    path.write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))
    with pytest.raises(ExportError, match="AutoTokenizer splits text otherwise than tokenizer.json"):
        verify_export(folder, student, TOKENS)


def test_folders_without_the_zeros_are_still_read(export, tmp_path):
    """As exports before wrote them; weights of an output bias that training in transformers gave are refused."""
    student, folder = export("llama3_2")
    names = [f"model.layers.{layer}.self_attn.o_proj.bias" for layer in (1, 3)]
    edit_tensors(folder, lambda tensors: [tensors.pop(name) for name in names])
    state_dict = import_hybrid(folder).state_dict
    assert all(torch.equal(state_dict[key], value) for key, value in student.state_dict().items())
    edit_tensors(folder, lambda tensors: tensors.update({names[1]: torch.full((32,), 1e-3)}))
    with pytest.raises(ValueError, match=r"layers.3.self_attn.\* no longer has the form"):
        import_hybrid(folder)


def test_refuses_to_read_tensors_that_no_student_has(export):
    _, folder = export("qwen3")
    edit_tensors(folder, lambda tensors: tensors.update({"model.layers.1.self_attn.o_proj.bias": torch.ones(32)}))
    with pytest.raises(
        ValueError, match="holds model.layers.1.self_attn.o_proj.bias, which a qwen3 hybrid .* does not have"
    ):
        import_hybrid(folder)
