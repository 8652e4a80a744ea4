"""Several sources in one dataset: their shares, boundaries, provenance, and parts that follow one another."""

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from tcal_components.config import ConfigError
from tcal_components.data import BatchStream, assert_disjoint, mixed_text, packed_text
from tcal_components.data.roles import provenance, recut
from tcal_components.data.token_files import TokenFiles


def documents(letter, count, length=13):
    return [f"{letter}{index:03d}" + letter * (length - 4) for index in range(count)]


@pytest.fixture
def sources(tmp_path, write_jsonl):
    """Texts of the letters a, b and c, 14 tokens a document, 40 documents each."""
    return [{"source": write_jsonl(tmp_path / f"{letter}.jsonl", documents(letter, 40))} for letter in "abc"]


def weighted(sources, *weights):
    return [{**source, "weight": weight} for source, weight in zip(sources, weights)]


def test_each_source_has_its_share(tokenizer, sources):
    dataset = mixed_text(tokenizer, sources=weighted(sources, 2, 1, 1), seq_len=8, max_tokens=400)
    assert [part["tokens"] for part in dataset.sources["parts"]] == [200, 96, 96] and len(dataset) == 49
    assert dataset.sources["tokens"] == dataset.num_tokens == 392
    assert [part["weight"] for part in dataset.sources["parts"]] == [2, 1, 1]
    alone = [packed_text(tokenizer, source=source["source"], seq_len=8) for source in sources]
    for row in range(len(dataset)):
        part, index = (0, row) if row < 25 else (1, row - 25) if row < 37 else (2, row - 37)
        item, own = dataset[row], alone[part][index]
        for name in ("tokens", "input_pos", "document"):
            assert torch.equal(item[name], own[name])
        # The last label of a source is of a text that does not follow here.
        last = row in (24, 36, 48)
        assert torch.equal(item["labels"][: 7 if last else 8], own["labels"][: 7 if last else 8])
        assert not last or item["labels"][7] == -100
    first = np.concatenate([dataset.learned_ids(number) for number in range(len(dataset.documents))])
    assert np.array_equal(first, dataset.tokens)  # every token is of one document


def test_shares_hold_in_what_is_trained_on(tokenizer, sources):
    dataset = mixed_text(tokenizer, sources=weighted(sources, 3, 1), seq_len=8, max_tokens=320)
    letters = torch.tensor([tokenizer.encode("a")[0], tokenizer.encode("b")[0]])
    stream = BatchStream(dataset, batch_size=20, seed=0)
    seen = torch.stack([stream.batch(step)["tokens"] for step in range(2)])
    counts = (seen[..., None] == letters).sum((0, 1, 2))
    assert counts[0] / counts[1] == pytest.approx(3, rel=0.1)
    assert (seen[0] == letters[0]).any() and (seen[0] == letters[1]).any()


def test_without_max_tokens_the_source_that_ends_first_decides(tokenizer, sources):
    dataset = mixed_text(tokenizer, sources=weighted(sources, 4, 1), seq_len=8)
    assert [part["tokens"] for part in dataset.sources["parts"]] == [560, 136]  # 70 of 70 rows, and a quarter of them


def test_a_beginning_has_the_same_shares(tokenizer, sources, tmp_path):
    """The alignment cuts the training text anew."""
    section = OmegaConf.create(
        {
            "_component_": "tcal_components.data.mixed_text",
            "sources": weighted(sources, 1, 3),
            "seq_len": 8,
            "max_tokens": 640,
        }
    )
    cut = recut(TokenFiles(tmp_path / "tokens", tokenizer, {}), "training", section, seq_len=16, max_tokens=256)
    assert [part["tokens"] for part in cut.sources["parts"]] == [64, 192]
    assert provenance({"training": cut})["training"]["parts"][1]["path"] == sources[1]["source"]


def test_parts_that_follow_one_another_share_nothing(tokenizer, sources):
    given = {"sources": weighted(sources, 5, 2, 1), "seq_len": 8}
    first = mixed_text(tokenizer, **given, max_tokens=200)
    skip = first.sources["skipped_tokens"] + first.num_tokens
    second = mixed_text(tokenizer, **given, max_tokens=128, skip_tokens=skip)
    assert_disjoint({"first": first, "second": second}, min_tokens=4)
    assert second.sources["skipped_tokens"] >= skip


def test_the_sha256_is_of_all_tokens(tokenizer, sources):
    one, other = (
        mixed_text(tokenizer, sources=weighted(sources, *weights), seq_len=8, max_tokens=160).sources
        for weights in ((1, 1), (1, 3))
    )
    assert one["sha256"] != other["sha256"] and one["parts"][0]["sha256"] != other["parts"][0]["sha256"]


def test_mistakes_are_one_line(tokenizer, sources):
    def made(*entries, **options):
        return mixed_text(tokenizer, sources=list(entries), **{"seq_len": 8, "max_tokens": 160, **options})

    for entries, said in (
        ((), "sources is empty"),
        (({"weight": 1.0},), r"sources\[0\].source is missing"),
        (({**sources[0], "share": 1},), r"unknown key 'share' in sources\[0\]"),
        (({**sources[0], "weight": 0},), r"sources\[0\].weight is 0"),
        (
            weighted(sources, 1, 0.001),
            r"sources\[1\] .* has 0.000999 of max_tokens 160, which is less than one sequence",
        ),
    ):
        with pytest.raises((ConfigError, ValueError), match=said) as error:
            made(*entries)
        assert "\n" not in str(error.value)
    with pytest.raises(
        ValueError, match=r"sources\[0\] .* has 560 tokens, its share of max_tokens 2000 is 1000; give it"
    ):
        made(*weighted(sources, 1, 1), max_tokens=2000)
