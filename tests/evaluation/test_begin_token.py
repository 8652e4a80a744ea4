"""lm-eval opens its prompts as training opened its documents."""

import importlib.util
import json

import pytest

from tcal_components.evaluation import harness

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs lm-eval: pip install 'taylor-calibrate[eval]'"
)


@pytest.mark.parametrize("adds", ["post_processor", "key", None])
def test_prompts_of_lm_eval(tmp_path, monkeypatch, adds):
    import lm_eval
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["<eos>", "<unk>", "<bos>", "one", "two", "a"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if adds == "post_processor":
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    tokenizer.add_special_tokens(words[:3])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "bos_token": "<bos>"}
    if adds == "key":
        named["add_bos_token"] = True
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 8}
    config = transformers.Qwen3Config(vocab_size=6, num_key_value_heads=1, **sizes)
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    read, seen = [], []

    def evaluate(model, **_):
        original = model._model_call
        monkeypatch.setattr(
            model, "_model_call", lambda tokens, **k: seen.append(tokens.tolist()) or original(tokens, **k)
        )
        requests = [
            type("Request", (), {"args": pair, "arguments": pair})() for pair in (("one", " two"), ("<bos>one", " two"))
        ]
        model.loglikelihood(requests, disable_tqdm=True)
        read.append(model.tok_batch_encode(["one two"])[0].tolist())
        return {"results": {}, "samples": {}, "configs": {}}

    monkeypatch.setattr(harness, "check_tasks", lambda *_, **__: None)  # reads thousands of files
    monkeypatch.setattr(lm_eval, "simple_evaluate", evaluate)
    harness.lm_eval_results(tmp_path, tasks=["tcal_local"], dtype="float32", batch_size=1)
    opened = [2] if adds else []
    assert read == [[[*opened, 3, 4]]]
    # The last token is what is to be predicted; a prompt that has the token is not given it again (equal ones are run once).
    assert {tuple(map(tuple, tokens)) for tokens in seen} == {((*opened, 3),), ((2, 3),)}
