"""Dialogues as transformers renders them, prompts as torchtune's recipes ask for them."""

import json

import pytest
from torchtune.data import Message
from transformers import AutoTokenizer

from tcal_components.data import hf_tokenizer, packed_chat

TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = TAGGED.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def dialogue(*contents, masked=()):
    """User and assistant in turn; ``masked`` names answers that are not to be learned."""
    roles = ["user", "assistant"] * len(contents)
    return [
        Message(role=role, content=content, masked=role == "user" or number in masked)
        for number, (role, content) in enumerate(zip(roles, contents))
    ]


def turns(messages):
    return [{"role": message.role, "content": message.text_content} for message in messages]


def learned(tokenizer, ids, mask):
    return tokenizer.decode([i for i, masked in zip(ids, mask) if not masked], skip_special_tokens=False)


@pytest.mark.parametrize("texts", [("hi", "hello", "who?", "me"), ("é €", "日本 😀\n", " x ", "\n\n"), ("a", "")])
def test_generation_tags_mask_as_in_transformers(variant, texts):
    folder = variant({"chat_template": TAGGED}, begin=None)
    messages = dialogue(*texts)
    ids, mask = hf_tokenizer(folder).tokenize_messages(messages)
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        turns(messages), return_assistant_tokens_mask=True, return_dict=True
    )
    assert ids == theirs["input_ids"] and [not masked for masked in mask] == [
        bool(i) for i in theirs["assistant_masks"]
    ]


def test_tags_and_masked_answers(variant):
    """An answer that the data masks is not learned, whatever its template marks."""
    tokenizer = hf_tokenizer(variant({"chat_template": TAGGED}, begin=None))
    messages = dialogue("hi", "one", "and?", "two", masked=(1,))
    assert learned(tokenizer, *tokenizer.tokenize_messages(messages)) == "two<|im_end|>"
    messages[0].masked = False  # asked to learn a question, which the marks say nothing of
    assert (
        learned(tokenizer, *tokenizer.tokenize_messages(messages)) == "<|im_start|>user\nhi<|im_end|>\ntwo<|im_end|>\n"
    )


def test_tags_allow_a_template_that_rewrites_earlier_turns(variant):
    rewriting = "{{ messages | length }} turns." + TAGGED
    tokenizer = hf_tokenizer(variant({"chat_template": rewriting}, begin=None))
    ids, mask = tokenizer.tokenize_messages(dialogue("a", "one", "b", "two"))
    assert learned(tokenizer, ids, mask) == "one<|im_end|>two<|im_end|>"


@pytest.mark.parametrize(
    "template",
    [
        "{{ strftime_now('%Y') }}" + PLAIN,
        "{{ {'b': 1, 'a': 'é'} | tojson(indent=2, sort_keys=true) }}" + PLAIN,
        "{{ [1, 2] | tojson(separators=(',', ':')) }}" + PLAIN,
        "{{ messages[0] | tojson(ensure_ascii=true) }}" + PLAIN,
        "{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}" + PLAIN,
        "{{ bos_token }}{{ eos_token }}" + PLAIN,
    ],
)
def test_ids_equal_those_of_transformers(variant, template):
    folder = variant({"chat_template": template}, begin=None)
    messages = dialogue("Grüße", "ok", "next", "\n\nlast ")
    tokenizer, theirs = hf_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize_messages(messages)[0] == theirs.apply_chat_template(turns(messages))["input_ids"]
    prompt = tokenizer({"messages": messages[:3]}, inference=True)["tokens"]
    assert prompt == theirs.apply_chat_template(turns(messages[:3]), add_generation_prompt=True)["input_ids"]


NAMED = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": "tools {{ messages | length }}"}]


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"chat_template": NAMED}, {}),
        ({"chat_template": None}, {"chat_template.jinja": PLAIN, "additional_chat_templates/tool_use.jinja": "tools"}),
        ({"chat_template": "another"}, {"chat_template.jinja": PLAIN}),
    ],
)
def test_templates_by_name(variant, config, files):
    tokenizer = hf_tokenizer(variant(config, begin=None, files=files))
    ids, mask = tokenizer.tokenize_messages(dialogue("hi", "hello"))
    assert learned(tokenizer, ids, mask) == "hello<|im_end|>\n"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        (NAMED[1:] * 2, "no default"),
        ("{{ raise_exception('only one\nturn') }}", "chat template of .*: only one"),
        ("{% if %}", "chat template of .*: Expected an expression"),
        ("{{ messages[0].content + 1 }}", "chat template of .*: can only concatenate str"),
        ("{{ nothing.at.all }}", "chat template of .*: 'nothing' is undefined"),
        (7, "chat template of|cannot read the tokenizer"),
        ([1], "transformers cannot read the tokenizer of .*: 'int' object"),
    ],
)
def test_a_template_that_fails_is_one_line(variant, template, message):
    tokenizer = hf_tokenizer(variant({"chat_template": template}, begin=None))
    with pytest.raises(ValueError, match=message) as caught:
        tokenizer.tokenize_messages(dialogue("hi", "hello"))
    assert "\n" not in str(caught.value)


def test_prompts_end_where_the_answer_begins(variant):
    tokenizer = hf_tokenizer(variant(begin=None))

    def prompt(*contents):
        out = tokenizer({"messages": dialogue(*contents), "other": 1}, inference=True)
        assert out["other"] == 1 and all(out["mask"]) and len(out["mask"]) == len(out["tokens"])
        return tokenizer.decode(out["tokens"], skip_special_tokens=False)

    asked = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt("hi", "") == prompt("hi") == asked  # torchtune's recipe adds the empty answer
    assert prompt("hi", "It is ") == asked + "It is "
    assert prompt("hi", "yes", "so") == asked + "yes<|im_end|>\n" + asked.replace("hi", "so")


def test_a_folder_without_template_takes_a_prompt_as_text(variant):
    tokenizer = hf_tokenizer(variant({"chat_template": None}))
    messages = [Message(role="system", content="Once"), *dialogue("upon a time", "")]
    assert tokenizer({"messages": messages}, inference=True)["tokens"] == [1, *tokenizer.encode("Once\nupon a time")]


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({}, None, [0]),
        ({"eos_token": "<|im_end|>"}, {"eos_token_id": [0, 2]}, [2, 0]),
        ({"eos_token": {"content": "<|im_end|>", "special": True}}, {"eos_token_id": 0}, [2, 0]),
        ({"eos_token": None}, {"eos_token_id": [2, 5]}, [2, 5]),
    ],
)
def test_stop_tokens_are_all_that_end_an_answer(variant, config, generation, expected):
    tokenizer = hf_tokenizer(variant(config, generation, begin=None))
    assert tokenizer.stop_tokens == expected and tokenizer.eos_id == expected[0]


def test_padding_is_no_token_of_a_prompt(variant):
    """torchtune's generate masks every token of a prompt that equals ``pad_id``."""
    config = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    tokenizer = hf_tokenizer(variant(config, begin=None))
    assert tokenizer.pad_id not in tokenizer({"messages": dialogue("hi", "yes", "so")}, inference=True)["tokens"]
    assert tokenizer.fill_id == 2, "rows are padded as before"
    assert hf_tokenizer(variant({**config, "chat_template": None}, begin=None)).pad_id == 2
    assert hf_tokenizer(variant({"pad_token": "<|im_end|>", "chat_template": "{{ messages[0].content }}"})).pad_id == 2


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("tokenizer_config.json", "[]", "tokenizer_config.json holds a list; a JSON object is needed"),
        ("tokenizer_config.json", '{"eos_token": 5}', "tokenizer_config.json: eos_token is 5, expected text"),
        ("tokenizer_config.json", '{"eos_token": {"content": []}}', "eos_token is .*expected text"),
        ("tokenizer_config.json", '{"eos_token": "\\ud800"}', "tokenizer_config.json holds half a surrogate pair"),
        ("tokenizer_config.json", "[" * 100_000, "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", '{"a": ' + "9" * 5000 + "}", "tokenizer_config.json is not valid JSON"),
        (
            "generation_config.json",
            '{"eos_token_id": "2"}',
            "generation_config.json: eos_token_id is '2', expected an id",
        ),
        ("generation_config.json", '{"eos_token_id": [2, null]}', "eos_token_id is .*expected an id"),
        ("generation_config.json", '{"eos_token_id": true}', "eos_token_id is True, expected an id"),
        ("config.json", "\xff", "config.json is not UTF-8 text"),
        ("tokenizer.json", "[" * 100_000, "cannot read .*tokenizer.json as a tokenizer"),
        ("tokenizer.json", '{"model": 1}', "cannot read .*tokenizer.json as a tokenizer"),
    ],
)
def test_broken_tokenizer_files_are_one_line(variant, file, text, message):
    folder = variant({"eos_token": None}, {"eos_token_id": 0})
    (folder / file).write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=message) as caught:
        hf_tokenizer(folder)
    assert "\n" not in str(caught.value)


def chat_node(path, **changes):
    return {
        "_component_": "torchtune.datasets.chat_dataset",
        "source": "json",
        "data_files": str(path),
        "split": "train",
        "conversation_column": "messages",
        "conversation_style": "openai",
        **changes,
    }


@pytest.mark.parametrize(
    ("content", "changes", "message"),
    [
        ('{"messages": 7}\n', {}, "sample 0 cannot be read as a dialogue: TypeError"),
        ('{"messages": [{"role": "user", "content": "a"}]}\n', {}, "sample 0 cannot be read as a dialogue"),
        ('{"other": []}\n', {}, "sample 0 cannot be read as a dialogue: KeyError: 'messages'"),
        ('{"messages"\n', {}, "chat_dataset cannot read source json, data_files .*chat.jsonl: .*JSON parse error"),
        ("", {"data_files": "nowhere/at/all.jsonl"}, "no such file or folder: nowhere/at/all.jsonl"),
        ("", {"source": "./missing.jsonl", "data_files": None}, "no such file or folder: missing.jsonl"),
        ("", {"data_files": "/dev/zero"}, "/dev/zero is a pipe or device"),
    ],
)
def test_broken_dialogues_are_one_line(variant, tmp_path, content, changes, message):
    (tmp_path / "chat.jsonl").write_text(content)
    node = chat_node(tmp_path / "chat.jsonl", **changes)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        packed_chat(hf_tokenizer(variant(begin=None)), dataset=node, seq_len=40)
    assert "\n" not in str(caught.value)


def test_packed_dialogues_learn_what_the_template_marks(variant, tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": f"ok {i}"}]} for i in "ab"
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = hf_tokenizer(variant({"chat_template": "{{ bos_token }}" + TAGGED}))
    row = packed_chat(tokenizer, dataset=chat_node(tmp_path / "chat.jsonl"), seq_len=100)[0]
    assert tokenizer.decode(row["labels"][row["labels"] >= 0].tolist(), False) == "ok a<|im_end|>ok b<|im_end|>"
    opened = [int(row["tokens"][i]) for i in range(100) if row["input_pos"][i] == 0 and row["document"][i] >= 0]
    assert opened == [1, 1]
