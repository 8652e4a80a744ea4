"""torchtune's own recipes `generate` and `eleuther_eval`, with their own configs, on an exported student."""

import importlib.util
import json
import re
import sys
from functools import partial
from importlib import metadata
from pathlib import Path

import pytest
import torch
import torchtune
import yaml
from omegaconf import OmegaConf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tcal_components.data import hf_tokenizer
from tcal_components.export.folder import export_hybrid
from tcal_components.export.import_hybrid import hybrid_from_export, import_hybrid
from tcal_components.plugin.tune_hook import install

TORCHTUNE = Path(torchtune.__file__).parents[1] / "recipes"
SPECIALS = ["<|begin|>", "<|eot|>", "<|end|>", "<|reserved|>"]
# As Llama's: the template writes the begin token, and the padding token ends every turn.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture
def student_folder(tiny_spec, random_hybrid, tmp_path):
    """Export of a random student whose tokenizer opens texts with a begin token."""
    teacher = tmp_path / "teacher"
    (teacher / "additional_chat_templates").mkdir(parents=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=260, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["ab"], trainer)
    tokenizer.save(str(teacher / "tokenizer.json"))
    names = {"bos_token": "<|begin|>", "eos_token": "<|eot|>", "pad_token": "<|eot|>", "add_bos_token": True}
    names["tokenizer_class"] = "PreTrainedTokenizerFast"
    (teacher / "tokenizer_config.json").write_text(json.dumps(names))
    (teacher / "chat_template.jinja").write_text(TEMPLATE)
    (teacher / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (teacher / "config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}))
    (teacher / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": [2, 1]}))
    student = random_hybrid(tiny_spec("llama3_2", vocab_size=264, num_layers=3), (1,))
    export_hybrid(
        student.state_dict(),
        spec=student.spec,
        gdn=student.gdn,
        retained_layers=(1,),
        teacher_dir=teacher,
        output_dir=tmp_path / "export",
        dtype=torch.float32,
    )
    return tmp_path / "export"


def config(name, folder, **changes):
    """torchtune's config with the components of an export in it."""
    cfg = OmegaConf.to_container(OmegaConf.load(TORCHTUNE / "configs" / f"{name}.yaml"))
    cfg["model"] = {
        "_component_": "tcal_components.export.import_hybrid.hybrid_from_export",
        "checkpoint_dir": str(folder),
    }
    cfg["checkpointer"] |= {
        "_component_": "tcal_components.export.checkpointer.HybridCheckpointer",
        "checkpoint_dir": str(folder),
    }
    cfg["tokenizer"] = {"_component_": "tcal_components.data.hf_tokenizer", "path": str(folder)}
    return OmegaConf.create({**cfg, "device": "cpu", "dtype": "fp32", **changes})


def load_recipe(name):
    spec = importlib.util.spec_from_file_location(f"torchtune_{name}", TORCHTUNE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def student_of(folder):
    model = hybrid_from_export(checkpoint_dir=folder)
    model.load_state_dict(import_hybrid(folder).state_dict)
    return model.eval()


@torch.no_grad()
def greedy(model, tokens, steps, stop):
    tokens = list(tokens)
    for _ in range(steps):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
        if tokens[-1] in stop:
            break
    return tokens


@pytest.mark.parametrize("kv_cache", [True, False])
@pytest.mark.parametrize("dialogue", [True, False])
def test_generate(student_folder, monkeypatch, kv_cache, dialogue):
    """The student's own greedy answer to transformers' prompt, up to the first of all its ends."""
    from transformers import AutoTokenizer

    user, system = "What is it?", "Be brief"
    turns = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    if dialogue:
        prompt = AutoTokenizer.from_pretrained(student_folder).apply_chat_template(turns, add_generation_prompt=True)
        prompt = prompt["input_ids"]
        assert prompt.count(0) == 1 and prompt.count(1) == 2, "one begin token, and the padding token ends the turns"
    else:  # a base model
        (student_folder / "chat_template.jinja").unlink()
        (student_folder / "additional_chat_templates" / "tool_use.jinja").unlink()
        prompt = hf_tokenizer(student_folder).encode(f"{system}\n{user}", add_bos=True)
    free = greedy(student_of(student_folder), prompt, 8, ())
    end = free[len(prompt) + 5]  # what would come sixth is made one of the ends
    (student_folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, end]}))
    expected = greedy(student_of(student_folder), prompt, 8, (1, 2, end))
    assert len(prompt) < len(expected) < len(free)

    found = []
    original = torchtune.generation.generate
    monkeypatch.setattr(torchtune.generation, "generate", lambda *a, **k: found.append(original(*a, **k)) or found[-1])
    cfg = config(
        "generation",
        student_folder,
        prompt={"system": system, "user": user},
        max_new_tokens=8,
        temperature=0.0,
        top_k=1,
        enable_kv_cache=kv_cache,
    )
    recipe = load_recipe("generate").InferenceRecipe(cfg)
    recipe.setup(cfg)
    recipe.generate(cfg)
    assert found[0][0][0].tolist() == expected


def test_an_export_keeps_all_templates(student_folder):
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(student_folder).chat_template == {"default": TEMPLATE, "tool_use": "tools"}


needs_lm_eval = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs lm-eval: pip install 'taylor-calibrate[eval]'"
)


@needs_lm_eval
def test_eleuther_eval(student_folder, tmp_path, monkeypatch):
    """Without network: a local task, and a folder in place of the gpt2 that the recipe loads and never uses."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from tcal_components.evaluation.harness import local_documents

    GPT2LMHeadModel(GPT2Config(vocab_size=264, n_positions=8, n_embd=8, n_layer=1, n_head=1)).save_pretrained(
        tmp_path / "gpt2"
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "gpt2" / name).write_text((student_folder / name).read_text())
    documents = local_documents(24)
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "test.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tasks / "test.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{text}}",
    }
    choose = {"task": "choose", "output_type": "multiple_choice", "doc_to_choice": "{{choices}}"}
    choose |= {"doc_to_target": "{{label}}", "metric_list": [{"metric": "acc"}]}
    write = {"task": "write", "output_type": "generate_until", "doc_to_target": "{{text}}"}
    write |= {"generation_kwargs": {"until": ["\n"]}, "metric_list": [{"metric": "exact_match"}]}
    for task in (choose, write):
        (tasks / f"{task['task']}.yaml").write_text(yaml.safe_dump({**shared, **task}))
    # Prompts of different lengths are padded on the left, 8 a batch, and generation needs room for 256 tokens.
    settings = {"tasks": ["choose", "write"], "include_path": str(tasks), "max_seq_length": 400, "batch_size": 8}
    settings["model"] = {**config("generation", student_folder).model, "max_seq_len": 400}
    monkeypatch.chdir(tmp_path)  # where transformers finds the folder gpt2
    monkeypatch.setattr(metadata, "version", metadata.version)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, "torchtune._cli.run", raising=False)
    install()  # as at the start of `tune`
    importlib.import_module("torchtune._cli.run")
    module = load_recipe("eleuther_eval")
    monkeypatch.setattr(module, "TaskManager", partial(module.TaskManager, include_defaults=False))  # 7 s of reading
    cfg = config("eleuther_evaluation", student_folder, **settings)
    recipe = module.EleutherEvalRecipe(cfg)
    recipe.setup(cfg)
    said: list[str] = []
    monkeypatch.setattr(recipe.logger, "info", said.append)
    recipe.evaluate()
    scores = {
        task: float(value) for task, value in re.findall(r"\|(choose|write) *\|.*?↑ *\| *([\d.]+)", "".join(said))
    }

    model, tokenizer = student_of(student_folder), hf_tokenizer(student_folder)
    right = 0
    for document in documents:
        context = tokenizer.encode(document["text"])
        likelihoods = []
        for choice in document["choices"]:
            answer = tokenizer.encode(" " + choice)
            with torch.no_grad():
                logits = model(torch.tensor([[*context, *answer][:-1]]))[0, -len(answer) :].log_softmax(-1)
            likelihoods.append(float(logits.gather(1, torch.tensor(answer)[:, None]).sum()))
        right += likelihoods.index(max(likelihoods)) == document["label"]
    assert scores == {"choose": pytest.approx(right / len(documents), abs=1e-4), "write": 0.0}
