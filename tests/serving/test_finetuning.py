"""The blocks of docs/finetuning.md run as they stand, on a small export."""

import json
import re
import runpy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tcal_components.export.import_hybrid import import_hybrid

BLOCKS = re.findall(
    r"```python\n(.*?)```", (Path(__file__).resolve().parents[2] / "docs" / "finetuning.md").read_text(), re.DOTALL
)


@pytest.fixture
def run_block(tmp_path, monkeypatch):
    """Runs the block with this word in it on an export instead of the quickstart's."""

    def run(word, export):
        (code,) = (block for block in BLOCKS if word in block)
        code = code.replace("runs/quickstart/export", str(export)).replace("runs/finetuned", str(tmp_path / "tuned"))
        (tmp_path / "block.py").write_text(code.replace("bf16=False", "bf16=False, use_cpu=True"))
        monkeypatch.setenv("TQDM_DISABLE", "1")
        runpy.run_path(str(tmp_path / "block.py"))
        return tmp_path / "tuned" / "merged"

    return run


def without_torchao(monkeypatch):
    """PEFT refuses the torchao that torchtune needs, also where it is not used."""
    for module in ("peft", "trl"):
        pytest.importorskip(module)
    monkeypatch.setattr("peft.tuners.lora.torchao.is_torchao_available", lambda: False)


@pytest.mark.parametrize("family", ["qwen3", "qwen2_5"])
def test_lora(small_export, run_block, monkeypatch, family):
    without_torchao(monkeypatch)
    export = small_export(family)
    before = load_file(export / "model.safetensors")
    merged = run_block("SFTTrainer", export)
    after = load_file(merged / "model.safetensors")
    assert after.keys() == before.keys()
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert moved and all(name.endswith("_proj.weight") or ".in_proj_" in name for name in moved)
    assert after["model.layers.1.linear_attn.A_log"].dtype == torch.float32
    assert json.loads((merged / "config.json").read_text()) == json.loads((export / "config.json").read_text())
    assert (merged / "tokenizer.json").read_bytes() == (export / "tokenizer.json").read_bytes()
    with pytest.raises(ValueError, match="no longer has the form"):  # the output gate was trained
        import_hybrid(merged)


def test_four_bits(small_export, run_block, capsys):
    pytest.importorskip("bitsandbytes")
    run_block("BitsAndBytesConfig", small_export("qwen3"))
    assert capsys.readouterr().out.startswith("My fellow citizens, the state of")
