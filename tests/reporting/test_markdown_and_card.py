"""report.md and the model card: the numbers are there, the metadata is YAML."""

import re

import pytest
import yaml

from tcal_components.ablation.tables import fewer_tokens_table, recovery_table
from tcal_components.reporting import Report, render_markdown, render_model_card, teacher_license, write_model_card


def test_markdown_holds_the_numbers_and_their_ratios(report):
    text = render_markdown(report.data, plots=[("report.png", "the plot")])
    assert "![the plot](report.png)" in text
    for number in ("14 355", "143.2", "18.41", "12.87", "11.64"):
        assert number in text
    assert f"**{12.87 / 11.64:.4g}x** the teacher's" in text
    assert "**1 115x** better than the plain copy" in text  # 14355 / 12.87
    assert "| after alignment | 18.41 | 1.582x | 779.7x | 885 k |" in text
    assert "worst 0.25 (layer 5)" in text
    assert "134,515,008" in text and "150,123,456" in text
    assert "3.25e-05" in text and "qwen3_5_text" in text and "rotary positions" in text and "corpus/train" in text
    assert "`" + report["config_sha256"][:12] + "`" in text


def test_markdown_holds_the_evaluation(report):
    text = render_markdown(report.data)
    assert "| hybrid | 12.87 | 1.106x | 1,234 |" in text
    assert "| model | 0-63 |" in text and "64-255" not in text  # an empty bucket is no column
    assert "| copy | hybrid | 62.5 % | 62.5 % | 0.1 % |" in text
    assert "| hybrid | 87.5 % | 0.0519 | 0.312 (layer 1) |" in text
    assert "| 1024 | teacher | 4 321 | 87.5 | 3 MiB | 3 MiB |" in text
    assert "| tcal_local | acc | 0.4375 | 0.4375 |" in text


def test_recall_has_a_mean_beside_its_table_or_a_word_on_where_it_is_measured(report):
    assert "Mean recall: teacher 62.5 %, hybrid 62.5 %." in render_markdown(report.data)
    del report.data["evaluation"]
    text = render_markdown(report.data)
    assert "## Recall\n\nNot measured by this recipe" in text and "recipes/evaluate_hybrid" in text


def test_samples_stand_side_by_side_and_as_they_are(report):
    texts = {"teacher": " of a | b,\n\n  <b>*so*</b>", "student": " "}
    report.data["samples"] = [{"prompt": "x" * 500 + " the end", "texts": texts}]
    text = render_markdown(report.data)
    section = text.split("## Samples of text")[1].split("\n## ")[0]
    assert section.splitlines()[4:] == [
        "| teacher | student |",
        "|---|---|",
        r"| of a \| b, ⏎ \<b\>\*so\*\</b\> |   |",
    ]
    assert "After “… xxx" in section and "the end”:" in section


def test_recovery_tables_hold_the_best_run_and_the_comparison():
    best = {"lr": 1e-3, "base_lr": 3e-4, "tokens": 5_000_000, "batch_size": 16}
    best["curve"] = [{"tokens": 0, "perplexity": 143.2}, {"tokens": 5_000_000, "perplexity": 12.87}]
    start = {"tokens_before": 131072, "best": best, "tokens_to": {"1.5": 310_000.0, "1.2": None, "1.1": None}}
    recovery = {
        "ratios": ["1.5", "1.2", "1.1"],
        "baseline": "naive/none",
        "starts": {"taylor/ours": {**start, "fewer_than": {"1.5": 4.25, "1.2": {"at_least": 3.125}, "1.1": None}}},
    }
    table = recovery_table(recovery)
    assert "| taylor/ours | 131 k | 143.2 | 12.87 | 0.001 / 0.0003, 5 M, 16 | 310 k | - | - |" in table
    assert fewer_tokens_table(recovery).splitlines() == [
        "| fewer tokens than naive/none | to 1.5x | to 1.2x | to 1.1x |",
        "|---|---:|---:|---:|",
        "| taylor/ours | 4.25x | ≥ 3.12x | - |",
    ]


def test_tables_are_rectangular(report):
    for block in re.findall(r"(?:^\|.*\n)+", render_markdown(report.data), flags=re.MULTILINE):
        assert len({line.count("|") for line in block.splitlines()}) == 1, block


def test_empty_report_renders(tmp_path, config):
    text = render_markdown(Report(tmp_path, "r", config).data)
    assert text.startswith("# Report of r") and "None" not in text and "## Perplexity" not in text


def test_finish_writes_markdown_with_every_plot_it_names(report):
    path = report.finish()
    text = path.read_text()
    names = re.findall(r"!\[[^]]*\]\(([^)]*)\)", text)
    assert "report.png" in names and len(names) >= 8
    assert all((path.parent / name).stat().st_size > 5000 for name in names)


def test_model_card_metadata_and_content(report, tmp_path):
    text = render_model_card(
        report.data,
        name="smol-hybrid",
        teacher='Some/Teacher: "instruct"',
        base_model='Some/Teacher: "instruct"',
        license="Apache-2.0",
        serving_notes=["transformers >= 5.2: run"],
        limits=["English only"],
    )
    _, head, body = text.split("---\n", 2)
    metadata = yaml.safe_load(head)
    assert metadata["license"] == "apache-2.0" and metadata["base_model"] == 'Some/Teacher: "instruct"'
    metric = metadata["model-index"][0]["results"][0]["metrics"][0]
    assert metric == {"type": "perplexity", "value": pytest.approx(12.87)}
    assert "4 of 6 attention layers" in body and "aligned layer by layer and distilled end to end" in body
    assert "AutoModelForCausalLM.from_pretrained" in body and "trust_remote_code" not in body
    for part in ("transformers >= 5.2: run", "English only", "12.87", "819,200", "corpus/train", "0, 4"):
        assert part in body


def test_the_card_names_no_folder_of_the_machine_and_the_folder_that_it_lies_in(report, tmp_path):
    text = tmp_path / "a person" / "text.jsonl"
    text.parent.mkdir()
    text.touch()
    sources = {"training": str(text), "evaluation": "asset:quickstart/eval.jsonl", "calibration": "Some/dataset"}
    sources |= {"heldout": "../private/texts", "other": "~/private/more"}
    report.replace("data", {part: {"source": source, "documents": 3} for part, source in sources.items()})
    folder = tmp_path / "run" / "export"
    folder.mkdir(parents=True)
    card = write_model_card(report.data, folder, name="run", teacher="t").read_text()
    assert str(tmp_path) not in card and "a person" not in card and "private" not in card
    for line in (
        "- training: text.jsonl (3 d",
        "- evaluation: asset:quickstart/eval.jsonl (",
        "- calibration: Some/dataset (",
    ):
        assert line in card
    assert "# run\n" in card and 'folder = "export"' in card


def test_model_card_replaces_the_teachers_card_and_claims_no_training_that_was_not(report, tmp_path):
    (tmp_path / "README.md").write_text("the teacher's card")
    report.update({"tokens": {"alignment": None, "distillation": None}, "export": {"format": "hf_custom"}})
    path = write_model_card(report.data, tmp_path, teacher="t")
    text = path.read_text()
    assert "the teacher's card" not in text and f"# {tmp_path.name}" in text
    assert "without training" in text and "aligned layer by layer" not in text
    assert "trust_remote_code=True" in text
    metadata = yaml.safe_load(text.split("---\n", 2)[1])
    assert metadata["license"] == "other" and "base_model" not in metadata


@pytest.mark.parametrize(
    ("card", "license"),
    [
        ("---\nlanguage: en\nlicense: apache-2.0\n---\n# Teacher\n", "apache-2.0"),
        ("---\nlicense: 'llama3.2'\n---\n", "llama3.2"),
        ("---\nlanguage: en\n---\nlicense: mit\n", None),
        ("# Teacher\nlicense: mit\n", None),
        (None, None),
    ],
)
def test_the_licence_is_that_of_the_teachers_card(tmp_path, card, license):
    if card is not None:
        (tmp_path / "README.md").write_text(card)
    assert teacher_license(tmp_path) == license
