"""lm-eval: tasks from local files on a folder, programs and their tests, a clear line without the package."""

import gzip
import importlib.util
import json

import pytest
import torch

from tcal_components.evaluation import harness
from tcal_components.evaluation.code_tests import CodeEval, local_code_eval, passes
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
        harness.lm_eval_results(tmp_path, tasks=["tcal_local"])
    assert "\n" not in str(error.value)


def test_without_the_backend_there_is_one_clear_line(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "accelerate" else object())
    with pytest.raises(ValueError, match="accelerate, which lm-eval needs for transformers, is not installed"):
        harness.lm_eval_results(tmp_path, tasks=["tcal_local"])


def test_scores_are_flat_and_without_errors_of_the_mean():
    results = {
        "niah_single_1": {"alias": "x", "4096,none": 0.5, "8192,none": -1, "4096_stderr,none": "N/A"},
        "gsm8k": {"exact_match,strict-match": 0.25, "exact_match_stderr,strict-match": 0.1},
    }
    assert harness._scores(results) == {"niah_single_1": {"4096": 0.5}, "gsm8k": {"exact_match (strict-match)": 0.25}}


@pytest.fixture
def folder(tmp_path):
    """A model of one layer that writes the words of the local task."""
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
    return tmp_path


@needs_lm_eval
def test_local_task_runs_on_a_folder(folder):
    scores, answers = harness.lm_eval_results(folder, tasks=["tcal_local"], dtype="float32")
    assert scores.keys() == {"tcal_local"} and 0 <= scores["tcal_local"]["acc"] <= 1
    assert answers == {}  # it generates nothing
    with pytest.raises(ValueError, match="unknown lm-eval task 'no_such_task'"):
        harness.lm_eval_results(folder, tasks=["no_such_task"])
    with pytest.raises(FileNotFoundError, match="is no model folder"):
        harness.lm_eval_results(folder / "none", tasks=["tcal_local"])


def write_lines(path, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


@needs_lm_eval
def test_a_generative_task_of_ones_own(folder, tmp_path):
    """Questions whose right answer is what the model writes, and one that is not."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    rows = []
    for text in ("red green blue", "north south", "one"):
        tokens = tokenizer(text, return_tensors="pt")["input_ids"]
        made = model.generate(tokens, max_new_tokens=3, do_sample=False)[0, tokens.shape[1] :]
        rows.append({"text": text, "answer": tokenizer.decode(made, skip_special_tokens=True)})
    rows[1]["answer"] = "no such answer"
    task = {
        "task": "tiny_words",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": write_lines(tmp_path / "words.jsonl", rows)}},
        "output_type": "generate_until",
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"max_gen_toks": 3, "do_sample": False, "until": ["<none>"]},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    (tmp_path / "words.yaml").write_text(json.dumps(task))  # which is YAML too
    scores, answers = harness.lm_eval_results(
        folder, tasks=[str(tmp_path / "words.yaml")], dtype="float32", batch_size=1
    )
    assert scores["tiny_words"]["exact_match"] == pytest.approx(2 / 3)
    assert answers == {"tiny_words": [1.0, 0.0, 1.0]}


GSM8K = [{"question": f"What is {n} and {n}?", "answer": f"Twice.\n#### {2 * n}"} for n in range(8)]


@needs_lm_eval
def test_a_task_of_lm_eval_from_local_files(folder, tmp_path):
    files = {"gsm8k": {split: write_lines(tmp_path / f"{split}.jsonl", GSM8K) for split in ("train", "test")}}
    scores, answers = harness.lm_eval_results(
        folder, tasks=["gsm8k"], files=files, dtype="float32", limit=3, num_fewshot=2
    )
    assert scores["gsm8k"].keys() == {"exact_match (strict-match)", "exact_match (flexible-extract)"}
    assert answers == {"gsm8k": [0.0, 0.0, 0.0]}


@needs_lm_eval
def test_code_tasks_load_and_score_without_a_hub(tmp_path):
    from lm_eval.tasks import TaskManager

    problem = {
        "task_id": "own/0",
        "prompt": "def twice(x):\n",
        "entry_point": "twice",
        "canonical_solution": "    return 2 * x\n",
        "test": "def check(f):\n    assert f(4) == 8\n",
    }
    path = write_lines(tmp_path / "problems.jsonl.gz", [problem])
    given = harness.local_files_task("humaneval", {"test": path}, tmp_path)
    with local_code_eval(True):
        task = TaskManager().load([given])["tasks"]["humaneval"]
    (doc,) = task.test_docs()
    filters = task._filters[0].filters[0]()
    for written, passed in (("    return 2 * x\n", 1.0), ("    return x\n", 0.0)):
        candidates = list(filters.apply([[written]], [doc]))
        assert task.process_results(doc, candidates)["pass@1"] == passed


def test_mistakes_with_files_are_one_line(tmp_path):
    lines = write_lines(tmp_path / "a.jsonl", [{}])
    with pytest.raises(ValueError, match="the task humaneval runs the programs that a model writes; allow_code"):
        harness.check_tasks(["humaneval"])
    with pytest.raises(FileNotFoundError, match=r"lm_eval.files.gsm8k.test: .* does not exist"):
        harness.check_tasks(["gsm8k"], {"gsm8k": {"test": str(tmp_path / "none.jsonl")}})
    with pytest.raises(ValueError, match="files of the task 'mbpp', expected one of lm-eval's own among"):
        harness.check_tasks(["gsm8k"], {"mbpp": {"test": lines}})
    with pytest.raises(ValueError, match=r"a.txt is none of .json, .jsonl"):
        (tmp_path / "a.txt").write_text("x")
        harness.check_tasks(["gsm8k"], {"gsm8k": {"test": str(tmp_path / "a.txt")}})
    with pytest.raises(ValueError, match="expected files of one kind, got none"):
        harness.check_tasks(["gsm8k"], {"gsm8k": {}})


# -------------------------------------------------------------------------------------------------- programs and tests


def test_programs_run_apart_and_for_a_limited_time(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "x")
    assert passes("assert 2 + 2 == 4")
    assert not passes("assert 2 + 2 == 5") and not passes("def (") and not passes("x = 'a\0b'")
    assert not passes("exit()") and not passes("import sys; sys.exit(0)")  # before its tests
    assert not passes("while True: pass", seconds=2)
    assert not passes("x = bytearray(8 << 30)")
    assert passes("import os; assert 'SECRET' not in os.environ and not os.listdir('.')")


def test_the_share_of_programs_that_pass():
    metric = CodeEval(True)
    references, predictions = ["assert f() == 1", "assert f() == 2"], [["def f(): return 1"], ["def f(): return 1"]]
    assert metric.compute(references=references, predictions=predictions, k=[1])[0] == {"pass@1": 0.5}
    with pytest.raises(ValueError, match=r"k \[10\], expected \[1\]"):
        metric.compute(references=references, predictions=predictions, k=[10])
    assert CodeEval(False).compute(references=["raise SystemError"], predictions=[[""]])[0] == {"pass@1": 0.0}
