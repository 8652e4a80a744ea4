import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tcal_components.data import hf_tokenizer

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    """A byte-level tokenizer of 260 ids: each byte is a token, so tests can count tokens by characters."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=259, special_tokens=specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["ab"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": None, "eos_token": "<|endoftext|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder):
    return hf_tokenizer(tokenizer_folder)


@pytest.fixture
def write_jsonl():
    def write(path, texts, column="text"):
        path.write_text("".join(json.dumps({column: text, "id": i}) + "\n" for i, text in enumerate(texts)))
        return str(path)

    return write


@pytest.fixture
def variant(tmp_path_factory, tokenizer_folder):
    """Makes a folder of the byte tokenizer with other settings: ``variant(config, generation, begin=, template=)``.

    ``<|im_start|>`` (1) is its begin token; ``begin`` says what adds it: ``post_processor``, ``key`` (add_bos_token) or None.
    """

    def make(config=None, generation=None, *, begin="post_processor", files=None):
        folder = tmp_path_factory.mktemp("variant")
        data = json.loads((tokenizer_folder / "tokenizer.json").read_text())
        if begin == "post_processor":
            opened = [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
            data["post_processor"] = {
                "type": "TemplateProcessing",
                "single": opened,
                "pair": [*opened, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
            }
        (folder / "tokenizer.json").write_text(json.dumps(data))
        named = {"bos_token": "<|im_start|>", "eos_token": "<|endoftext|>", "chat_template": CHAT_TEMPLATE}
        settings = {**named, **({"add_bos_token": True} if begin == "key" else {}), **(config or {})}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        if generation is not None:
            (folder / "generation_config.json").write_text(json.dumps(generation))
        for name, text in (files or {}).items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
        return folder

    return make
