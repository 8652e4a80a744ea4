"""The lines that a run says."""

from pathlib import Path

from tcal_components.assets import asset_path
from tcal_components.reporting.console import closing_lines, stage_line
from tcal_components.reporting.report import empty_report


def report():
    found = empty_report()
    found["teacher"]["perplexity"] = 35.5
    found["perplexity"] |= {"naive": 93.7, "aligned": 36.62}
    found["seconds"] |= {"measure": 1.04, "align": 42.7, "export": 3.0}
    found["tokens"] |= {"calibration": 40_960, "alignment": 1_000_000}
    found["export"] |= {"max_abs_logit_diff": 2.1e-5, "reference_logit_max": 31.26}
    return found


def test_a_stage_is_one_line_with_its_result():
    assert stage_line(report(), "measure") == "measure:    1.0 s   41 k tokens"
    assert stage_line(report(), "align") == "align:      42.7 s   1 M tokens   perplexity 36.62, 1.03 x the teacher's"
    assert stage_line(report(), "export") == "export:     3.0 s   logits differ from the student's by 2.1e-05 of 31.3"
    assert stage_line(empty_report(), "distill") == "distill:    0.0 s"


def test_the_end_says_what_came_out_and_what_to_do_with_it(tmp_path):
    lines = closing_lines(report(), tmp_path)
    assert lines[:3] == [
        "teacher:     perplexity 35.50",
        "plain copy:  perplexity 93.70, 2.64 x the teacher's",
        "aligned:     perplexity 36.62, 1.03 x the teacher's",
    ]
    assert lines[3].endswith("report.md") and len(lines) == 4, "nothing was exported"
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "config.json").write_text("{}")
    lines = closing_lines(report(), tmp_path, asset_path("quickstart"))
    assert "from_pretrained" in lines[4]
    command = f"evaluate it: tune run recipes/evaluate_hybrid --config configs/evaluate.yaml run_dir={tmp_path}"
    assert lines[5] == command


def test_the_command_that_evaluates_is_of_this_run(tmp_path):
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "config.json").write_text("{}")
    found = report()
    found |= {"data": {"evaluation": {"source": "my/eval.jsonl"}}, "device": "NVIDIA H200"}
    found["perplexity"]["aligned"] = None
    assert closing_lines(found, tmp_path, Path("my/teacher"))[-1].endswith(
        " teacher_dir=my/teacher validation_dataset.source=my/eval.jsonl students.aligned=null device=cuda dtype=bf16"
    )
