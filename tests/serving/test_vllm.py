"""The commands for vLLM and its plugin, without vLLM: what is compared, what is timed, what is registered."""

import argparse
import json
import sys
import types
from importlib.metadata import entry_points
from importlib.util import find_spec

import pytest
import torch

from tcal_components.config import read_json
from tcal_components.serving import outline, vllm_check, vllm_plugin, vllm_speed


def scored(shift=0.0, greedy=0.0):
    return {
        "text_logprobs": [-1.0 + shift, -2.0],
        "written_logprobs": [[-0.5, -0.25 - shift], [-3.0]],
        "greedy": [[0.0, greedy], [0.0]],
    }


def test_differences_are_measured_against_what_bfloat16_costs():
    reference = {"float32": scored(greedy=0.5), "bfloat16": scored(0.02)}
    result = vllm_check.compare(scored(-0.04), reference)
    assert result["ok"] and result["greedy_equal"] == pytest.approx(2 / 3) and result["worst_choice"] == 0.5
    assert result["prefill"]["vllm"] == {"mean": pytest.approx(0.02), "max": pytest.approx(0.04)}
    assert result["decode"]["bfloat16"]["mean"] == pytest.approx(0.02 / 3)
    assert result["perplexity"]["float32"] == pytest.approx(4.4817, rel=1e-4)
    wrong = vllm_check.compare(scored(0.5), reference)
    assert not wrong["ok"] and wrong["problems"][0].startswith("prefill: log-probabilities are off by 0.25")
    assert not vllm_check.compare(scored(float("nan")), reference)["ok"]


@pytest.mark.skipif(
    find_spec("triton") is not None, reason="with triton, transformers takes kernels that a CPU does not run"
)
def test_transformers_scores_the_tokens_that_vllm_wrote(small_export, tmp_path):
    folder = small_export("qwen3")
    tokens = torch.randint(3, 2048, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    measured = {"text": tokens[:24], "prompts": [tokens[:8], tokens[8:16]], "written": [tokens[30:33], tokens[33:36]]}
    (tmp_path / "in.json").write_text(json.dumps(measured))
    vllm_check.main([str(folder), "--output", str(tmp_path / "out.json"), "--score", str(tmp_path / "in.json")])
    found = json.loads((tmp_path / "out.json").read_text())["float32"]

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        given = torch.tensor([tokens[8:16] + tokens[33:36]])
        expected = model(given, use_cache=False).logits[0, 7:10].log_softmax(-1)
    assert found["written_logprobs"][1] == pytest.approx(
        [float(expected[i, token]) for i, token in enumerate(tokens[33:36])], abs=1e-4
    )
    assert found["greedy"][1][0] == pytest.approx(float(expected[0].max() - expected[0, tokens[33]]), abs=1e-4)
    assert len(found["text_logprobs"]) == 23


class Engine:
    """Reads ``part`` tokens of one prompt a step; every request that is read gets a token."""

    def __init__(self, part):
        self.part, self.unread, self.written, self.limits = part, {}, {}, {}

    def add_request(self, name, prompt, asked):
        self.unread[name], self.written[name] = len(prompt["prompt_token_ids"]), []
        self.limits[name] = asked.max_tokens

    def step(self):
        ready = [name for name, left in self.unread.items() if left <= 0]
        waiting = next((name for name, left in self.unread.items() if left > 0), None)
        if waiting:
            self.unread[waiting] -= self.part
            ready += [waiting] if self.unread[waiting] <= 0 else []
        for name in ready:
            self.written[name].append(0)
            assert len(self.written[name]) <= self.limits[name]
        return [
            types.SimpleNamespace(request_id=name, outputs=[types.SimpleNamespace(token_ids=list(self.written[name]))])
            for name in ready
        ]

    def has_unfinished_requests(self):
        return bool(self.unread)

    def abort_request(self, names):
        for name in names:
            del self.unread[name]


def test_prefill_and_decoding_are_timed_apart(monkeypatch):
    engine, clock = Engine(vllm_speed.TOKENS_A_STEP), iter(range(1000))
    parameters = types.SimpleNamespace(SamplingParams=lambda **given: types.SimpleNamespace(**given))
    monkeypatch.setitem(sys.modules, "vllm", parameters)
    monkeypatch.setattr(vllm_speed.time, "perf_counter", lambda: next(clock))
    row = vllm_speed._measure(types.SimpleNamespace(llm_engine=engine), 3, 20_000, 5, 100)
    assert [len(tokens) for tokens in engine.written.values()] == [7 + 5, 4 + 5, 1 + 5]
    # The clock goes on by one a look: 1 from the start to the first tokens of all, 1 to the end.
    assert row == {"prefill_tokens_per_second": 60_000, "decode_tokens_per_second": 15}
    assert not engine.unread


def test_an_outline_is_the_config_of_an_export_and_of_its_teacher(tmp_path):
    outline.main(["qwen2_5_1_5b", str(tmp_path), "--retained-layers", "1", "5"])
    teacher, hybrid = (read_json(tmp_path / name / "config.json") for name in ("teacher", "hybrid"))
    assert teacher["model_type"] == "qwen2" and hybrid["model_type"] == "qwen3_5_text"
    assert teacher["max_position_embeddings"] == hybrid["max_position_embeddings"] == outline.POSITIONS
    assert [i for i, kind in enumerate(hybrid["layer_types"]) if kind == "full_attention"] == [1, 5]

    from transformers import AutoConfig

    assert AutoConfig.from_pretrained(tmp_path / "teacher").num_hidden_layers == teacher["num_hidden_layers"]


def fake_vllm(monkeypatch, known):
    registered = {}
    registry = types.SimpleNamespace(
        get_supported_archs=lambda: set(known), register_model=lambda name, where: registered.update({name: where})
    )
    seen = []

    class Config:
        @staticmethod
        def verify_and_update_config(vllm_config):
            seen.append(vllm_config)

    configs = types.SimpleNamespace(MODELS_CONFIG_MAP={}, Qwen3_5ForConditionalGenerationConfig=Config)
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(ModelRegistry=registry))
    monkeypatch.setitem(sys.modules, "vllm.model_executor", types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.model_executor.models", types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.model_executor.models.config", configs)
    return registered, configs.MODELS_CONFIG_MAP, seen


def test_the_plugin_registers_the_class_where_vllm_does_not(monkeypatch):
    (entry,) = (e for e in entry_points(group="vllm.general_plugins") if e.name == "taylor_calibrate")
    registered, configs, seen = fake_vllm(monkeypatch, known=["Qwen3ForCausalLM"])
    entry.load()()
    assert registered == {"Qwen3_5ForCausalLM": "tcal_components.serving.vllm_model:Qwen3_5ForCausalLM"}
    rope = {"rope_theta": 1e6, "mrope_section": [11, 11, 10], "mrope_interleaved": True}
    text = argparse.Namespace(rope_parameters=rope)
    given = argparse.Namespace(model_config=argparse.Namespace(hf_text_config=text))
    configs["Qwen3_5ForCausalLM"].verify_and_update_config(given)
    assert seen == [given] and rope == {"rope_theta": 1e6}


def test_the_plugin_leaves_a_vllm_alone_that_knows_the_class(monkeypatch):
    registered, configs, _ = fake_vllm(monkeypatch, known=["Qwen3_5ForCausalLM"])
    vllm_plugin.register()
    assert not registered and not configs
