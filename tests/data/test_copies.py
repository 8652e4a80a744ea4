"""Copies of a document in another part of the text: cut, re-wrapped, in a longer document; and what merely looks alike."""

import json
import textwrap

import numpy as np
import pytest

from tcal_components.assets import asset_path
from tcal_components.data import assert_disjoint, disjoint, from_torchtune, hf_tokenizer, packed_text


@pytest.fixture(scope="module")
def tokenizer():
    return hf_tokenizer(asset_path("quickstart"))


@pytest.fixture(scope="module")
def prose():
    """Long documents that have nothing in common."""
    lines = (asset_path("quickstart") / "train.jsonl").read_text().splitlines()
    return [text for text in (json.loads(line)["text"] for line in lines) if len(text) > 6000]


@pytest.fixture
def part(tokenizer, tmp_path, write_jsonl):
    def make(name, texts, **options):
        return packed_text(tokenizer, source=write_jsonl(tmp_path / f"{name}.jsonl", texts), seq_len=32, **options)

    return make


def rewrapped(text, width=71):
    return "\n".join(textwrap.wrap(text, width))


def with_page_headers(text):
    lines = rewrapped(text).splitlines()
    return "\n".join(f"{line}\n\n    {i // 60}   A BOOK\n" if i % 60 == 59 else line for i, line in enumerate(lines))


CHANGES = {
    "cut": lambda text: text[1234:4321],
    "rewrapped": rewrapped,
    "upper": str.upper,
    "cut and rewrapped": lambda text: rewrapped(text[777:3000].upper()),
    "page headers": with_page_headers,
    "one typing error": lambda text: text[:2000] + "#" + text[2001:4000],
    "hyphens": lambda text: text.replace(" the ", " the\u2003"),
}


@pytest.mark.parametrize(
    ("role", "change"), [*(("evaluation", name) for name in CHANGES), ("heldout", "cut"), ("calibration", "rewrapped")]
)
def test_a_copy_of_a_training_document_is_refused(part, prose, change, role):
    parts = {
        "training": part("training", prose[:6]),
        "evaluation": part("evaluation", prose[6:9]),
        "heldout": part("heldout", prose[9:11]),
        "calibration": part("calibration", prose[11:13]),
    }
    assert_disjoint(parts)
    copied = part("copied", [prose[13], CHANGES[change](prose[2]), prose[14]])
    with pytest.raises(ValueError, match=r"(9\d|100)% of a document of ") as caught:
        assert_disjoint({**parts, role: copied})
    message = str(caught.value)
    assert f"{role} (" in message and "copied.jsonl line 2" in message
    assert "training.jsonl line 3" in message and "\n" not in message


def test_a_training_document_within_a_longer_one_is_refused(part, prose):
    long = prose[5] + rewrapped(prose[0]) + prose[6]
    with pytest.raises(ValueError, match=r"of a document of training .*line 1\) stands in evaluation .*line 2"):
        assert_disjoint({"training": part("a", prose[:3]), "evaluation": part("b", [prose[8], long])})


def test_the_share_is_reported_where_nothing_is_refused(part, prose):
    """Half of one of three documents, and nothing of the others."""
    size = 6000
    new = [prose[10][:size], prose[3][: size // 2] + prose[11][: size // 2], prose[12][:size]]
    shares = assert_disjoint(
        {"training": part("a", prose[:6]), "evaluation": part("b", new), "heldout": part("c", prose[7:9])}
    )
    assert shares["evaluation"]["training"] == pytest.approx(1 / 6, abs=0.02)
    assert 0 < shares["training"]["evaluation"] < shares["evaluation"]["training"]
    assert shares["heldout"] == {"training": 0, "evaluation": 0} and shares["evaluation"]["heldout"] == 0


def test_short_documents_of_one_template_are_allowed(part, prose):
    """As they stand in any corpus: pages that differ in a title."""
    notice = "This chapter has moved. If you came here by an old link, look for it in the new edition of this manual, please."
    pages = [f"{prose[i][:40]}\n\n{notice}" for i in range(12)]
    parts = {"training": part("a", [*pages[:6], *prose[:3]]), "evaluation": part("b", [*pages[6:], *prose[3:5]])}
    shares = assert_disjoint(parts)
    assert 0 < shares["evaluation"]["training"] < 0.2


def test_what_is_not_used_of_a_document_does_not_count(part, prose):
    """The evaluation reads the beginning of its document; training has the end of it."""
    parts = {"training": part("a", [prose[4], prose[0][6000:]]), "evaluation": part("b", prose[:1], max_tokens=640)}
    assert parts["evaluation"].documents[0].length > 640
    assert assert_disjoint(parts)["evaluation"]["training"] == 0
    with pytest.raises(ValueError, match="of a document of training"):
        assert_disjoint({**parts, "evaluation": part("b", prose[:1])})


def test_token_arrays_and_sampled_places(part, prose, tokenizer, tmp_path, monkeypatch):
    ids = [token for text in prose[6:9] for token in tokenizer.encode(rewrapped(text), add_eos=True)]
    np.save(tmp_path / "a.npy", np.asarray(ids, dtype=np.uint16))
    array = packed_text(tokenizer, source=str(tmp_path / "a.npy"), seq_len=32)
    training = part("t", prose[:8])
    for most in (1 << 22, 3000):  # all places, and every 16th
        monkeypatch.setattr(disjoint, "_MOST_GRAMS", most)
        with pytest.raises(ValueError, match=r"t.jsonl line 7.*a.npy tokens 0 to "):
            assert_disjoint({"training": training, "evaluation": array})
        shares = assert_disjoint({"training": part("u", prose[:6]), "evaluation": array, "other": part("o", prose[9:])})
        assert shares["evaluation"] == {"training": 0, "other": 0}


def test_documents_longer_than_a_batch(part, prose, monkeypatch):
    text = " ".join(prose[:12])
    copy = part("b", [rewrapped(text[5000:40_000]), prose[13]])
    shares = {}
    for batch in (1 << 18, 500):
        monkeypatch.setattr(disjoint, "_BATCH_TOKENS", batch)
        with pytest.raises(ValueError, match="100% of a document of evaluation"):
            assert_disjoint({"training": part("a", [text]), "evaluation": copy})
        mixed = part("c", [text[5000:12_000] + prose[14]])
        shares[batch] = assert_disjoint({"training": part("a", [text]), "evaluation": mixed})["evaluation"]["training"]
    assert shares[500] == shares[1 << 18] > 0.1


def test_dialogues_are_compared_by_what_is_learned(tokenizer, prose):
    """The same question and system prompt are no copy; the same answer is."""

    def dataset(*pairs):
        rows = []
        for question, answer in pairs:
            asked, told = tokenizer.encode(question), tokenizer.encode(answer)
            rows.append({"tokens": [*asked, *told], "mask": [True] * len(asked) + [False] * len(told)})
        return from_torchtune(rows, seq_len=4096, tokenizer=tokenizer)

    question = prose[0][:1500]
    training = dataset((question, prose[1][:800]), (question, prose[2][:800]))
    assert assert_disjoint({"a": training, "b": dataset((question, prose[3][:800]))}) == {"a": {"b": 0}, "b": {"a": 0}}
    with pytest.raises(ValueError, match="sample 0.*sample 1|sample 1.*sample 0"):
        assert_disjoint(
            {"a": training, "b": dataset((prose[4][:900], rewrapped(prose[2][:800])), ("x", prose[5][:900]))}
        )


def test_a_run_reports_and_refuses(tmp_path, prose, write_jsonl):
    """Through the config: the share is in report.json's section, a copy is one line before any weight is read."""
    from omegaconf import OmegaConf

    from tcal_components.setup import Workbench

    texts = {
        "calibration": prose[:6],
        "training": prose[6:14],
        "evaluation": [prose[15], prose[7][:4000] + prose[16][:4000]],
    }

    def bench(**changes):
        folder, reader = str(asset_path("quickstart")), "tcal_components.checkpoint.teacher.HFTeacherCheckpointer"
        sources = {name: write_jsonl(tmp_path / f"{name}.jsonl", rows) for name, rows in {**texts, **changes}.items()}
        kind = {"_component_": "tcal_components.data.packed_text", "seq_len": 64}
        cfg = {
            "output_dir": str(tmp_path / "out"),
            "teacher_checkpointer": {"_component_": reader, "checkpoint_dir": folder},
            "teacher_model": {"_component_": "tcal_components.models.teacher", "checkpoint_dir": folder},
            "model": {"_component_": "tcal_components.models.hybrid", "checkpoint_dir": folder},
            "tokenizer": {"_component_": "tcal_components.data.hf_tokenizer", "path": folder},
            "retain": {"layers": [0, 3]},
            "calibration_dataset": {**kind, "source": sources["calibration"], "max_tokens": 1280},
            "dataset": {**kind, "source": sources["training"]},
            "validation_dataset": {**kind, "source": sources["evaluation"]},
            "align": {"seq_len": 64, "batch_size": 2, "heldout_batches": 2},
        }
        return Workbench(OmegaConf.create(cfg))

    rows = bench().provenance()
    assert 0.1 < rows["evaluation"]["found_in"]["training"] < 0.9
    assert rows["evaluation"]["found_in"]["calibration"] == 0 == rows["heldout"]["found_in"]["training"]
    assert all(len(row["found_in"]) == 3 for row in rows.values())
    with pytest.raises(ValueError, match="of a document of evaluation .*stands in training"):
        bench(evaluation=[prose[15], rewrapped(prose[7][500:4000])])
