import json
from pathlib import Path

import pytest
from embedded_teacher.copying import copy_accuracy
from safetensors import safe_open

from tcal_components.assets import asset_path, resolve
from tcal_components.checkpoint.teacher import load_teacher_state_dict
from tcal_components.data import assert_disjoint, hf_tokenizer, packed_text
from tcal_components.evaluation.perplexity import perplexity, perplexity_by_context
from tcal_components.models import teacher
from tcal_components.models.hf_config import read_spec

FOLDER = asset_path("quickstart")
PARTS = ("calibration", "train", "eval")
WEIGHTS = FOLDER / "model.safetensors"
trained = pytest.mark.skipif(
    not WEIGHTS.is_file(), reason="no trained weights in the assets (docs/embedded_teacher/train.yaml)"
)


def read(part):
    return [json.loads(line) for line in (FOLDER / f"{part}.jsonl").read_text().splitlines()]


def test_parts_are_small_and_share_no_work_and_no_document():
    sizes = {part: (FOLDER / f"{part}.jsonl").stat().st_size for part in PARTS}
    assert sum(sizes.values()) <= 3_000_000 and sizes["train"] > 2_000_000 and min(sizes.values()) > 100_000
    works = {part: {line["work"] for line in read(part)} for part in PARTS}
    for a, b in (("calibration", "train"), ("calibration", "eval"), ("train", "eval")):
        assert not works[a] & works[b]
    tokenizer = hf_tokenizer("asset:quickstart")
    assert_disjoint(
        {part: packed_text(tokenizer, source=f"asset:quickstart/{part}.jsonl", seq_len=512) for part in PARTS}
    )


def test_no_long_sentence_of_the_evaluation_text_is_in_the_other_parts():
    other = "\n".join(line["text"] for part in ("calibration", "train") for line in read(part))
    sentences = [s for line in read("eval") for s in line["text"].split(". ") if len(s) > 80]
    assert len(sentences) > 300
    assert not [s for s in sentences if s in other]


def test_quickstart_has_text_enough_for_its_config():
    tokenizer = hf_tokenizer("asset:quickstart")
    for part, tokens in (("calibration", 32_768), ("train", 500_000), ("eval", 32_768)):
        dataset = packed_text(tokenizer, source=f"asset:quickstart/{part}.jsonl", seq_len=256)
        assert dataset.num_tokens >= tokens and dataset.sources["documents"] >= 9


def test_tokenizer():
    tokenizer = hf_tokenizer("asset:quickstart")
    assert tokenizer.vocab_size == 2048 and tokenizer.eos_id == tokenizer.pad_id == 0
    text = read("eval")[0]["text"][:2000] + " £ ü 漢字\t<x>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text) / 2.8


def test_transformers_reads_tokenizer_and_config():
    from transformers import AutoConfig, AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(FOLDER)
    text = read("eval")[0]["text"][:500]
    assert theirs(text)["input_ids"] == hf_tokenizer(FOLDER).encode(text)
    assert theirs.eos_token_id == AutoConfig.from_pretrained(FOLDER).eos_token_id == 0


def test_model_fits_the_limits():
    spec = read_spec(FOLDER)
    assert (spec.family, spec.vocab_size, spec.tie_word_embeddings, spec.qk_norm) == ("qwen3", 2048, True, True)
    parameters = sum(p.numel() for p in teacher(checkpoint_dir=FOLDER).parameters())
    assert parameters == 3_050_688 and 2 * parameters < 7.5e6


def test_asset_paths():
    assert resolve("asset:quickstart/eval.jsonl") == FOLDER / "eval.jsonl"
    assert resolve("some/where") == Path("some/where") and resolve("~/x") == Path.home() / "x"
    with pytest.raises(FileNotFoundError, match="no asset asset:quickstrat; the package has: quickstart"):
        resolve("asset:quickstrat")
    with pytest.raises(ValueError, match="below the package's assets folder"):
        resolve("asset:../data")


@pytest.fixture(scope="module")
def model():
    built = teacher(checkpoint_dir=FOLDER)
    built.load_state_dict(load_teacher_state_dict(FOLDER))
    return built.float().eval()


@trained
def test_weights_are_bf16_and_small():
    assert WEIGHTS.stat().st_size <= 7_500_000
    with safe_open(WEIGHTS, "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118


@trained
def test_trained_teacher_predicts_held_out_text(model):
    tokenizer = hf_tokenizer(FOLDER)
    text = packed_text(tokenizer, source=str(FOLDER / "eval.jsonl"), seq_len=512, max_tokens=16 * 512)
    # Uniform guessing gives 2048; byte-pair frequencies alone several hundred.
    assert perplexity(model, text, batch_size=4).perplexity < 100


@trained
def test_trained_teacher_uses_its_context(model):
    """Attention is real: the same text is predicted better where there is more of it to look at."""
    tokenizer = hf_tokenizer(FOLDER)
    text = packed_text(tokenizer, source=str(FOLDER / "eval.jsonl"), seq_len=512, max_tokens=16 * 512)
    by_context = perplexity_by_context(model, text, lengths=[130, 512], scored=128, batch_size=4)
    assert by_context[512] < 0.96 * by_context[130]


@trained
def test_trained_teacher_copies(model):
    """Induction heads: the second occurrence of a random string is predicted, whatever the distance."""
    found = copy_accuracy(model, vocab_size=2048, reserved=(0,), distances=(16, 64, 256), num_sequences=16)
    assert found["chance"] < 0.001
    assert min(found["by_distance"].values()) > 0.9
