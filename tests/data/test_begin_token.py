"""Where a tokenizer opens a text with a begin token, all text that a model sees opens with it, once."""

import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from omegaconf import OmegaConf
from torchtune.data import Message

from tcal_components.assets import asset_path
from tcal_components.data import from_torchtune, hf_tokenizer, packed_text
from tcal_components.data.sources import readers
from tcal_components.evaluation.recall.tasks import TASKS, make_examples
from tcal_components.setup import Workbench

BEGIN, END = 1, 0
TEXTS = ["a first document", "<|im_start|>a second that says it itself", "third"]


def documents(dataset):
    """Token ids of the whole documents of a dataset."""
    ends = np.flatnonzero(dataset.tokens == END) + 1
    return [part.tolist() for part in np.split(dataset.tokens, ends) if len(part) and part[-1] == END]


@pytest.mark.parametrize("begin", ["post_processor", "key"])
def test_every_packed_document_opens_with_it_once(begin, variant, tmp_path, write_jsonl):
    tokenizer = hf_tokenizer(variant(begin=begin))
    plain = [tokenizer.encode(text.removeprefix("<|im_start|>")) for text in TEXTS]
    wanted = [[BEGIN, *ids, END] for ids in plain]
    folder = tmp_path / "txt"
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text)
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), tmp_path / "a.parquet")
    # Token arrays of others have begin tokens or have not.
    np.save(tmp_path / "without.npy", np.array([i for ids in plain for i in (*ids, END)], dtype=np.uint16))
    np.save(tmp_path / "with.npy", np.array([i for ids in wanted for i in ids], dtype=np.uint16))
    names = [write_jsonl(tmp_path / "a.jsonl", TEXTS), "txt", "a.parquet", "without.npy", "with.npy"]
    for name in names:
        dataset = packed_text(tokenizer, source=str(tmp_path / name), seq_len=2)
        assert documents(dataset) == wanted, name
        assert [document.length for document in dataset.documents] == [len(ids) for ids in wanted]
        starts = [(row["document"].diff(prepend=row["document"][:1] - 1) != 0) for row in dataset]
        first = [int(row["tokens"][i]) for row, start in zip(dataset, starts) for i in range(2) if start[i]]
        assert first.count(BEGIN) == 3


def test_a_document_read_in_pieces_opens_with_it_once(variant, tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "PIECE", 20_000)
    tokenizer = hf_tokenizer(variant())
    (tmp_path / "a.txt").write_text("words " * 10_000)
    tokens = packed_text(tokenizer, source=str(tmp_path / "a.txt"), seq_len=2).tokens
    assert tokens.tolist() == tokenizer.encode("words " * 10_000, add_bos=True, add_eos=True)[: len(tokens)]
    assert tokens[0] == BEGIN and (tokens == BEGIN).sum() == 1


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path, tokenizer_folder, tokenizer):
    data = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    data["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    data["padding"] = {
        "strategy": {"Fixed": 40},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    (tmp_path / "tokenizer_config.json").write_text((tokenizer_folder / "tokenizer_config.json").read_text())
    other = hf_tokenizer(tmp_path)
    assert other.encode("seven") == tokenizer.encode("seven") and other.encode_batch(["a"]) == [tokenizer.encode("a")]
    messages = [
        Message(role="user", content="seven", masked=True),
        Message(role="assistant", content="eight", masked=False),
    ]
    assert other.tokenize_messages(messages) == tokenizer.tokenize_messages(messages)


WRITES_IT = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"


@pytest.mark.parametrize("template", [WRITES_IT, WRITES_IT.removeprefix("{{ bos_token }}")])
def test_a_dialogue_opens_with_it_once(variant, template):
    tokenizer = hf_tokenizer(variant({"chat_template": template}))
    messages = [Message(role="user", content="hi", masked=True), Message(role="assistant", content="ok", masked=False)]
    ids, mask = tokenizer.tokenize_messages(messages)
    assert ids == [BEGIN, *tokenizer.encode("[user]hi<|endoftext|>[assistant]ok<|endoftext|>")]
    assert mask[0] and len(mask) == len(ids)
    row = from_torchtune([{"tokens": ids, "mask": mask}], seq_len=len(ids))[0]
    assert row["tokens"].tolist() == ids
    prompt = tokenizer({"messages": messages[:1]}, inference=True)["tokens"]
    assert prompt[0] == BEGIN and prompt.count(BEGIN) == 1


@pytest.mark.parametrize("begin", ["post_processor", "key"])
def test_questions_open_with_it_once(begin, variant):
    """Also where begin and end are one token, which the questions used to leave out."""
    folder = variant({"eos_token": "<|im_start|>"}, begin=begin)
    tokenizer = hf_tokenizer(folder)
    assert tokenizer.bos_id == tokenizer.eos_id == BEGIN
    for task in TASKS:
        for example in make_examples(task, tokenizer, distance=700, count=3, seed=0):
            assert example.tokens[0] == BEGIN and example.tokens.count(BEGIN) == 1 and example.distance == 700


def test_a_run_gives_it_to_every_part_of_its_text(tmp_path):
    """Calibration, judging, training and evaluation of a run whose teacher's tokenizer adds it."""
    folder = tmp_path / "teacher"
    folder.mkdir()
    for file in asset_path("quickstart").iterdir():
        if file.suffix != ".jsonl":
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "add_bos_token": True}))
    (tmp_path / "texts.jsonl").write_text(
        "".join(json.dumps({"text": f"Text number {i} of the run. " * 12}) + "\n" for i in range(60))
    )
    part = {"_component_": "tcal_components.data.packed_text", "source": str(tmp_path / "texts.jsonl"), "seq_len": 64}
    reader = "tcal_components.checkpoint.teacher.HFTeacherCheckpointer"
    bench = Workbench(
        OmegaConf.create(
            {
                "output_dir": str(tmp_path / "out"),
                "teacher_checkpointer": {"_component_": reader, "checkpoint_dir": str(folder)},
                "teacher_model": {"_component_": "tcal_components.models.teacher", "checkpoint_dir": str(folder)},
                "model": {"_component_": "tcal_components.models.hybrid", "checkpoint_dir": str(folder)},
                "tokenizer": {"_component_": "tcal_components.data.hf_tokenizer", "path": str(folder)},
                "retain": {"layers": [0, 3]},
                "calibration_dataset": {**part, "max_tokens": 640},
                "dataset": {**part, "skip_documents": 20, "max_tokens": 1280},
                "validation_dataset": {**part, "skip_documents": 40, "max_tokens": 640},
                "align": {"seq_len": 64, "batch_size": 2, "heldout_batches": 2},
            }
        )
    )
    parts = {**bench.data, "alignment": bench.training_data(64, 640)}
    assert len(parts) == 5 and bench.tokenizer.bos_id == END
    for role, dataset in parts.items():
        whole = np.split(dataset.tokens, np.flatnonzero(dataset.tokens == END))
        lengths = [len(part) for part in whole[1:-1]]  # of the quickstart, begin and end are one token
        assert min(lengths) == 1 and lengths.count(1) >= len(dataset.documents) - 1, role
        assert dataset.tokens[0] == END and not (np.diff(np.flatnonzero(dataset.tokens == END), n=2) == 0).any(), role


def test_text_of_a_tokenizer_that_adds_none_stays_as_it_was(variant, tmp_path, write_jsonl):
    """Token ids behind the published results."""
    tokenizer = hf_tokenizer(asset_path("quickstart"))
    dataset = packed_text(tokenizer, source="asset:quickstart/eval.jsonl", seq_len=256)
    assert dataset.sources["sha256"].startswith("2ac0f24feb300981")
    for config in ({}, {"add_bos_token": False}):  # it has a begin token and does not use it
        named = hf_tokenizer(variant(config, begin=None))
        text = packed_text(named, source=write_jsonl(tmp_path / "a.jsonl", ["one", "two"]), seq_len=2)
        assert named.bos_id == BEGIN and BEGIN not in text.tokens
