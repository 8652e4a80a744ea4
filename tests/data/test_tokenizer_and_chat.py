import json

import pytest
import torch
from torchtune.data import Message

from tcal_components.data import BatchStream, from_torchtune, hf_tokenizer, packed_chat, packed_text


def test_tokenizer_round_trip_and_special_tokens(tokenizer, tokenizer_folder):
    text = "héllo\n\tworld €"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text
    assert tokenizer.encode(text, add_bos=True, add_eos=True) == [*ids, tokenizer.eos_id]  # no BOS in this tokenizer
    assert tokenizer.encode_batch([text, "a"], add_eos=True) == [[*ids, 0], [*tokenizer.encode("a"), 0]]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (None, 0, 0) and tokenizer.vocab_size == 259
    assert hf_tokenizer(tokenizer_folder / "tokenizer.json").encode(text) == ids


def test_post_processor_adds_nothing_and_ids_come_from_generation_config(tmp_path, tokenizer_folder):
    data = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    (tmp_path / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": [2, 0]}))
    tokenizer = hf_tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    plain = hf_tokenizer(tokenizer_folder).encode("ab")
    assert tokenizer.encode("ab") == plain and tokenizer.encode_batch(["ab"]) == [plain]
    assert tokenizer.encode("ab", add_bos=True, add_eos=True) == [1, *plain, 2]


def test_tokenizer_mistakes(tmp_path, tokenizer_folder):
    with pytest.raises(FileNotFoundError, match="expected a folder with tokenizer.json"):
        hf_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text((tokenizer_folder / "tokenizer.json").read_text())
    with pytest.raises(ValueError, match="none of tokenizer_config.json"):
        hf_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        hf_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not valid JSON"):
        hf_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 0}')
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot read .*tokenizer.json as a tokenizer"):
        hf_tokenizer(tmp_path)


def dialogue(question, answer):
    return [
        Message(role="user", content=question, masked=True),
        Message(role="assistant", content=answer, masked=False),
    ]


def test_chat_template_masks_everything_but_the_answer(tokenizer):
    messages = [*dialogue("hi", "hello"), *dialogue("who?", "me")]
    ids, mask = tokenizer.tokenize_messages(messages)
    assert tokenizer.decode([i for i, m in zip(ids, mask) if not m]) == "hello\nme\n"
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text.startswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n")


def test_template_that_rewrites_turns_is_refused(tmp_path, tokenizer_folder):
    for file in tokenizer_folder.iterdir():
        (tmp_path / file.name).write_text(file.read_text())
    (tmp_path / "chat_template.jinja").write_text(
        "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(ValueError, match="rewrites earlier turns"):
        hf_tokenizer(tmp_path).tokenize_messages(dialogue("a", "b"))


class Samples(list):
    """A torchtune-style dataset: sized, indexable, unshifted labels or masks."""


def test_chat_rows_have_shifted_masked_labels_and_padding():
    samples = Samples(
        [
            {"tokens": [1, 2, 3, 4], "labels": [-100, -100, 3, 4]},
            {"tokens": [5, 6, 7], "mask": [True, False, False]},
            {"tokens": [8, 9], "mask": [True, True]},  # nothing to learn
            {"tokens": list(range(10, 25))},  # longer than a row
        ]
    )
    dataset = from_torchtune(samples, seq_len=6, pad_id=99)
    assert len(dataset) == 3 and dataset.sources["left_out"] == 1 and dataset.sources["cut"] == 1
    assert dataset[0]["tokens"].tolist() == [1, 2, 3, 4, 99, 99]
    assert dataset[0]["labels"].tolist() == [-100, 3, 4, -100, -100, -100]
    assert dataset[0]["document"].tolist() == [0, 0, 0, 0, -1, -1]
    assert dataset[0]["input_pos"].tolist() == [0, 1, 2, 3, 0, 0]
    assert dataset[1]["labels"].tolist() == [6, 7, -100, -100, -100, -100]
    assert dataset[2]["labels"].tolist() == [11, 12, 13, 14, 15, -100]
    assert dataset.num_tokens == 13 and dataset.padding_fraction == pytest.approx(5 / 18)
    packed = from_torchtune(Samples(samples[:2]), seq_len=8)
    assert packed[0]["document"].tolist() == [0, 0, 0, 0, 1, 1, 1, -1]
    assert packed[0]["labels"].tolist() == [-100, 3, 4, -100, 6, 7, -100, -100]
    assert next(BatchStream(packed, batch_size=1, seed=0))["tokens"].shape == (1, 8)
    assert len(from_torchtune(samples, seq_len=6, max_sequences=1)) == 1


@pytest.mark.parametrize("length", [6, 9])
def test_parts_of_samples_follow_one_another(length):
    """Also where samples were cut or left out, which count as read."""
    samples = Samples({"tokens": list(range(10 * i, 10 * i + 3 + i % 8))} for i in range(30))
    samples[4] = {"tokens": [40, 41], "mask": [True, True]}
    first = from_torchtune(samples, seq_len=length, max_sequences=5)
    second = from_torchtune(
        samples, seq_len=7, skip_tokens=first.sources["skipped_tokens"] + first.num_tokens, max_sequences=4
    )
    third = from_torchtune(samples, seq_len=5, skip_tokens=second.sources["skipped_tokens"] + second.num_tokens)
    parts = [[int(document.where.split()[-1]) for document in part.documents] for part in (first, second, third)]
    assert [*parts[0], *parts[1], *parts[2]] == [i for i in range(30) if i != 4]
    with pytest.raises(
        ValueError, match="no sample to learn from: 30 samples, 0 of them .*, 184 tokens of them passed"
    ):
        from_torchtune(samples, seq_len=5, skip_tokens=10**6)


def test_chat_fingerprint_tells_what_is_learned_and_where_samples_end():
    def sha256(*samples, pad_id=9):
        return from_torchtune(Samples(samples), seq_len=8, pad_id=pad_id).sources["sha256"]

    whole = {"tokens": [1, 2, 3, 4, 5, 6]}
    halves = [{"tokens": [1, 2, 3]}, {"tokens": [4, 5, 6]}]
    assert sha256(whole) == sha256({**whole, "mask": [False] * 6})
    others = [
        sha256({**whole, "mask": [True, True, *[False] * 4]}),
        sha256({**whole, "mask": [True] * 3 + [False] * 3}),
        sha256(*halves),
        sha256({"tokens": [1, 2, 3, 4]}, {"tokens": [5, 6]}),
        sha256({"tokens": [1, 2, 3, 4, 5, 6, 9]}),  # the last was padding
        sha256(whole, pad_id=8),
    ]
    assert len({sha256(whole), *others}) == 7


def test_chat_mistakes(tokenizer):
    with pytest.raises(ValueError, match="sample 0 has no tokens; its keys are: input"):
        from_torchtune(Samples([{"input": 1}]), seq_len=4)
    with pytest.raises(ValueError, match="2 tokens but 1 labels"):
        from_torchtune(Samples([{"tokens": [1, 2], "labels": [1]}]), seq_len=4)
    with pytest.raises(ValueError, match="no sample to learn from: 1 samples, 1 of them"):
        from_torchtune(Samples([{"tokens": [1, 2], "mask": [True, True]}]), seq_len=4)
    with pytest.raises(ValueError, match="packed_chat needs dataset"):
        packed_chat(tokenizer, dataset={"source": "x"}, seq_len=4)


def test_packed_chat_from_torchtune_dataset(tmp_path, tokenizer):
    lines = [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": f"ok {i}"}]} for i in range(4)
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    node = {
        "_component_": "torchtune.datasets.chat_dataset",
        "source": "json",
        "data_files": str(tmp_path / "chat.jsonl"),
        "split": "train",
        "conversation_column": "messages",
        "conversation_style": "openai",
    }
    dataset = packed_chat(tokenizer, dataset=node, seq_len=100)
    row = dataset[0]
    learned = torch.where(row["labels"] >= 0, row["labels"], 0)
    assert tokenizer.decode(learned[row["labels"] >= 0].tolist()) == "ok 0\nok 1\nok 2\n"
    assert 0 < dataset.padding_fraction < 0.5


def test_dataset_is_picklable_for_worker_processes(tmp_path, tokenizer, write_jsonl):
    dataset = packed_text(tokenizer, source=write_jsonl(tmp_path / "a.jsonl", ["some text"] * 8), seq_len=8)
    loader = torch.utils.data.DataLoader(dataset, batch_size=2, num_workers=1)
    assert torch.equal(next(iter(loader))["tokens"][0], dataset[0]["tokens"])
