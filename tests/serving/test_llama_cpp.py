"""llama.cpp against transformers, and what is said where it is not there."""

import subprocess
import sys

import pytest
import torch

from tcal_components.export.engines import llama_cpp_refusal
from tcal_components.export.import_hybrid import read_exported_folder
from tcal_components.export.verify import ExportError
from tcal_components.serving import llama_cpp_check as module
from tcal_components.serving.gguf import last_line, why
from tcal_components.serving.llama_cpp_check import EngineMissing, check_llama_cpp, find_engine

WINDOWS = torch.arange(64).view(2, 32)


def test_a_missing_engine_is_named(tmp_path):
    with pytest.raises(EngineMissing, match="no llama.cpp checkout is named"):
        find_engine(None)
    with pytest.raises(EngineMissing, match=r"has no convert_hf_to_gguf\.py"):
        find_engine(tmp_path)
    (tmp_path / "convert_hf_to_gguf.py").touch()
    with pytest.raises(EngineMissing, match="does not start"):
        find_engine(tmp_path, tmp_path / "no_python")
    python = tmp_path / "python"  # one without the bindings
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    with pytest.raises(EngineMissing, match="cannot use llama-cpp-py-sync: ModuleNotFoundError"):
        find_engine(tmp_path, python)


def test_what_llama_cpp_cannot_hold_is_known_beforehand(small_export):
    padded, _, _ = read_exported_folder(small_export("smollm2"))
    assert padded.gdn.value_head_dim == 64 and llama_cpp_refusal(padded, "qwen3_5_text") is None
    plain, _, _ = read_exported_folder(small_export("smollm2", pad_values=False))
    assert "key heads of 128 and value heads of 64" in llama_cpp_refusal(plain, "qwen3_5_text")
    assert "does not know exports of format hf_custom" in llama_cpp_refusal(padded, "hf_custom")
    for kept in ((), (0, 1, 2, 3)):
        layout, _, _ = read_exported_folder(small_export("qwen3", retained_layers=kept))
        assert "all or no layers keep attention" in llama_cpp_refusal(layout, "qwen3_5_text")


def test_the_reason_of_a_crash_is_found():
    assert last_line("x.cpp:345: GGML_ASSERT(buffer) failed\nwarning: no symbols\n") == (
        "x.cpp:345: GGML_ASSERT(buffer) failed"
    )
    killed = subprocess.run(
        [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], check=False, capture_output=True, text=True
    )
    assert why(killed) == "ended by signal 9; it says nothing"
    assert last_line("one\ntwo\n\n") == "two" and last_line("") == "it says nothing"


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3", {}),
        ("qwen2_5", {"max_shard_size": "300KB"}),
        ("llama3_2", {}),
        ("smollm2", {}),
    ],
)
def test_llama_cpp_computes_what_transformers_does(small_export, llama_cpp, family, changes):
    tokens = torch.randint(3, 2048, (48,), generator=torch.Generator().manual_seed(1)).tolist()
    found = check_llama_cpp(small_export(family, **changes), tokens, WINDOWS, kinds=("f32", "q8_0"), **llama_cpp)
    assert found["ok"] and found["tokenizer_equal"] and found["reference_logit_max"] > 1
    assert found["logits"]["f32"]["relative_error"] < 1e-3 and found["max_abs_logit_diff"] < 0.02
    assert (found["rope_error"] is not None) == (family == "llama3_2")
    assert found["perplexity"]["f32"] == pytest.approx(found["perplexity"]["student"], rel=1e-3)
    assert found["bytes"]["q8_0"] < found["bytes"]["f32"] / 2


def test_a_wrong_gguf_is_refused(small_export, llama_cpp, monkeypatch):
    """RoPE scaling dropped, as llama.cpp's own script does it, is found."""
    monkeypatch.setattr("tcal_components.serving.gguf.rearrange", lambda *_, **__: None)
    tokens = torch.randint(3, 2048, (48,), generator=torch.Generator().manual_seed(1)).tolist()
    with pytest.raises(ExportError, match="logits of f32 are off by"):
        check_llama_cpp(small_export("llama3_2"), tokens, WINDOWS, kinds=("f32",), **llama_cpp)


def test_differences_are_of_both_halves():
    expected = torch.zeros(4, 3)
    expected[:, 0] = 3.0
    found = expected.clone()
    found[1, 1] += 0.5
    found[3, 2] -= 2.0
    assert module._compare(found, expected) == {
        "prefill": 0.5,
        "decode": 2.0,
        "relative_error": pytest.approx((4.25 / 12) ** 0.5 / 2**0.5),
    }
