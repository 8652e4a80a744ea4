"""Text that the teacher writes: documents, what interrupts it, and its use as a source."""

import json
import sys
from pathlib import Path

import pytest

from tcal_components.assets import asset_path
from tcal_components.data import hf_tokenizer, mixed_text, packed_text

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["generate_text.documents=10", "generate_text.batch_size=4", "generate_text.new_tokens=24"]


@pytest.fixture
def write(load_recipe, monkeypatch):
    """Runs the recipe with a command line; returns the lines of its text."""

    def run(out, *changes):
        arguments = ["--config", str(ROOT / "configs" / "generate_text.yaml"), f"output_dir={out}", *SMALL, *changes]
        monkeypatch.setattr(sys, "argv", ["generate_text", *arguments])
        with pytest.raises(SystemExit) as end:
            load_recipe("generate_text").recipe_main()
        if end.value.code:
            raise RuntimeError(end.value.code)
        return (out / "text.jsonl").read_text().splitlines()

    return run


def test_an_interrupted_run_writes_the_same_documents(write, tmp_path, capsys):
    whole = write(tmp_path / "whole")
    rows = [json.loads(line) for line in whole]
    assert len(rows) == 10 and len({row["text"] for row in rows}) == 10
    assert all(0 < row["tokens"] <= 24 for row in rows)
    report = json.loads((tmp_path / "whole" / "report.json").read_text())
    assert report["tokens"]["generated"] == sum(row["tokens"] for row in rows)
    assert report["data"]["prompts"]["documents"] > 0 and report["generated_text"]["documents"] == 10

    out = tmp_path / "broken"
    assert write(out, "generate_text.documents=6") == whole[:6]
    text = out / "text.jsonl"
    text.write_bytes(text.read_bytes()[:-20])  # killed while it wrote the last line
    assert write(out) == whole
    assert write(out) == whole  # finished already

    with pytest.raises(RuntimeError):
        write(out, "generate_text.temperature=0.5")
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"error: {text} was written with another teacher, other prompts or settings (")
    assert "(generate_text.temperature 1.0 -> 0.5); remove it" in said
    assert text.read_text().splitlines() == whole


def test_the_prompts_are_in_the_text_or_not(write, tmp_path):
    kept = [json.loads(line)["text"] for line in write(tmp_path / "kept")]
    rest = [json.loads(line)["text"] for line in write(tmp_path / "rest", "generate_text.keep_prompts=false")]
    assert all(text.endswith(part) and len(text) > len(part) for text, part in zip(kept, rest))
    beginnings = [json.loads(line)["text"] for line in (asset_path("quickstart") / "train.jsonl").open()]
    assert any(text.startswith(kept[0][:20]) for text in beginnings)


def test_without_prompts_the_teacher_begins_by_itself(write, tmp_path):
    rows = [json.loads(line) for line in write(tmp_path, "prompt_dataset=null", "generate_text.new_tokens=12")]
    assert len({row["text"][:8] for row in rows}) > 3


def test_it_is_a_source_as_any_other(write, tmp_path):
    write(tmp_path)
    tokenizer = hf_tokenizer(asset_path("quickstart"))
    text = str(tmp_path / "text.jsonl")
    assert packed_text(tokenizer, source=text, seq_len=16).sources["path"] == text
    sources = [{"source": "asset:quickstart/train.jsonl", "weight": 3}, {"source": text, "weight": 1}]
    mixed = mixed_text(tokenizer, sources=sources, seq_len=16, max_tokens=512)
    assert [part["tokens"] for part in mixed.sources["parts"]] == [384, 128]
