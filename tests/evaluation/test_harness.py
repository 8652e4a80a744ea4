"""lm-eval: the local task on an exported folder, a clear line without the package."""

import importlib.util
import json

import pytest
import torch

from tcal_components.evaluation import harness
from tcal_components.evaluation.harness import local_documents, local_task

needs_lm_eval = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs lm-eval: pip install 'taylor-calibrate[eval]'"
)


def test_local_questions_have_one_right_answer_that_repetition_gives():
    documents = local_documents()
    assert documents == local_documents() and len(documents) == 40
    labels = set()
    for document in documents:
        words = document["text"].split()
        assert len(words) == 11 and words[6:] == words[:5] and len(set(words[:6])) == 6
        assert len(set(document["choices"])) == 4
        assert document["choices"][document["label"]] == words[5]
        labels.add(document["label"])
    assert labels == {0, 1, 2, 3}
    assert local_task()["custom_dataset"](anything=1)["test"][0]["label"] == documents[0]["label"]


def test_without_lm_eval_there_is_one_clear_line(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"lm-eval is not installed: pip install 'taylor-calibrate\[eval\]'") as error:
        harness.lm_eval_scores(tmp_path, tasks=["tcal_local"])
    assert "\n" not in str(error.value)


def test_without_the_backend_there_is_one_clear_line(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "accelerate" else object())
    with pytest.raises(ValueError, match="accelerate, which lm-eval needs for transformers, is not installed"):
        harness.lm_eval_scores(tmp_path, tasks=["tcal_local"])


def test_scores_are_flat_and_without_errors_of_the_mean():
    results = {
        "niah_single_1": {"alias": "x", "4096,none": 0.5, "8192,none": -1, "4096_stderr,none": "N/A"},
        "gsm8k": {"exact_match,strict-match": 0.25, "exact_match_stderr,strict-match": 0.1},
    }
    assert harness._scores(results) == {"niah_single_1": {"4096": 0.5}, "gsm8k": {"exact_match (strict-match)": 0.25}}


@needs_lm_eval
def test_local_task_runs_on_a_folder(tmp_path):
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"<eos>": 0, "<unk>": 1, **{word: index + 2 for index, word in enumerate(harness._WORDS)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        eos_token_id=0,
        bos_token_id=None,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    scores = harness.lm_eval_scores(tmp_path, tasks=["tcal_local"], dtype="float32")
    assert scores.keys() == {"tcal_local"} and 0 <= scores["tcal_local"]["acc"] <= 1
    with pytest.raises(ValueError, match="unknown lm-eval task 'no_such_task'"):
        harness.lm_eval_scores(tmp_path, tasks=["no_such_task"])
    with pytest.raises(FileNotFoundError, match="is no model folder"):
        harness.lm_eval_scores(tmp_path / "none", tasks=["tcal_local"])
