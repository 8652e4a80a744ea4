"""Runs side by side: the numbers of real reports, what does not compare, the plot."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tcal_components.reporting import load_report, write_json
from tcal_components.reporting.compare import main

RESULTS = Path(__file__).parents[2] / "docs" / "results"
FULL, SEQUENTIAL, POLISH = (RESULTS / f"smollm2_135m{tail}" for tail in ("", "_sequential", "_sequential_polish"))


def _changed(path: Path, source: Path, **sections) -> str:
    """A copy of a real report in a folder of its own, with some values changed."""
    report = load_report(source / "report.json")
    for name, values in sections.items():
        report[name] = {**report[name], **values} if isinstance(values, dict) else values
    write_json(path / "report.json", report)
    return str(path)


def _refused(capsys, *arguments) -> str:
    """The one line on stderr of a command that fails and prints nothing else."""
    with pytest.raises(SystemExit) as error:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert error.value.code == 2 and captured.out == "" and captured.err.count("\n") == 1
    return captured.err


def _cells(text: str, run: str) -> list[list[str]]:
    """The rows of ``run`` in every table."""
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:1] == "|"]
    return [row for row in rows if row[0] == run]


def test_numbers_of_real_runs(capsys):
    main([str(FULL), f"start={SEQUENTIAL}", f"polish={POLISH / 'report.json'}"])
    text = capsys.readouterr().out
    perplexity, cost = _cells(text, "smollm2_135m")
    assert perplexity == [
        *("smollm2_135m", "8/30", "11.58", "11 456 (989x)", "109.9 (9.488x)", "15.92 (1.374x)", "12.36 (1.067x)"),
        "0.116",
    ]
    assert cost[1:4] == ["262 k", "999 k", "5 M"]
    assert cost[4:] == ["12.4", "51.8", "105", "206", "0 (running)", "NVIDIA H200"]
    perplexity, cost = _cells(text, "start")  # two stages only
    assert perplexity[4:] == ["43.11 (3.721x)", "-", "-", "-"]
    assert cost[1:] == ["262 k", "-", "-", "10.9", "39.9", "-", "-", "-", "NVIDIA H200"]
    assert _cells(text, "polish")[0][5:7] == ["15.96 (1.378x)", "-"]
    assert "Notes" not in text and "comparison.png" not in text


def test_baseline_comes_first_and_ratios_are_of_a_stage_that_both_have(capsys):
    main([str(FULL), str(SEQUENTIAL), str(POLISH), "--baseline", POLISH.name])
    text = capsys.readouterr().out
    rows = [line.split(" | ")[0].strip("| ") for line in text.splitlines() if line.startswith("| smol")]
    assert rows[:3] == [POLISH.name, FULL.name, SEQUENTIAL.name]
    assert _cells(text, FULL.name)[0][-1] == "0.9974x aligned"  # 15.918 / 15.959
    assert _cells(text, SEQUENTIAL.name)[0][-1] == "0.3922x initialized"  # 43.105 / 109.911


def test_output_holds_the_numbers_unrounded_and_the_plot(tmp_path):
    import matplotlib.image

    out = tmp_path / "new" / "folder"
    main([str(FULL), str(SEQUENTIAL), "--output", str(out)])
    assert sorted(path.name for path in out.iterdir()) == ["comparison.json", "comparison.md", "comparison.png"]
    first, second = json.loads((out / "comparison.json").read_text())["runs"]
    report = load_report(FULL / "report.json")
    assert first["retained_layers"] == [0, 4, 8, 12, 16, 20, 24, 28] and first["layers"] == 30
    for key in ("perplexity", "tokens", "seconds", "recovery_curve"):
        assert first[key] == report[key]
    assert first["ratio_to_teacher"]["distilled"] == pytest.approx(12.357848887851453 / 11.583942200190794)
    errors = [row["last"] for row in report["alignment_error"].values()]
    assert len(errors) == 22 and first["alignment_error"] == pytest.approx(sum(errors) / 22)
    assert second["alignment_error"] is None and second["perplexity"]["distilled"] is None
    assert "](comparison.png)" in (out / "comparison.md").read_text()
    pixels = matplotlib.image.imread(out / "comparison.png")[..., :3]
    assert pixels.shape[1] == 1440 and 0.005 < (pixels < 0.5).any(axis=-1).mean() < 0.5


def test_states_of_different_size_are_a_column_and_a_panel(tmp_path, capsys):
    import matplotlib.image

    sizes = {"small": 512 * 1024, "large": 1024 * 1024}
    runs = [_changed(tmp_path / name, FULL, student={"state_bytes": size}) for name, size in sizes.items()]
    main([*runs, "--output", str(tmp_path / "out")])
    text = capsys.readouterr().out
    assert _cells(text, "small")[0][-1] == "512" and _cells(text, "large")[0][-1] == "1 024"
    main([*runs[:1], "--output", str(tmp_path / "one")])
    assert "state a sequence" not in capsys.readouterr().out
    high, low = (matplotlib.image.imread(tmp_path / name / "comparison.png").shape[0] for name in ("out", "one"))
    assert high > low + 300, "one panel more"


def _overlaps(boxes) -> list[tuple[str, str]]:
    return [(a, b) for i, (a, one) in enumerate(boxes) for b, other in boxes[i + 1 :] if one.overlaps(other)]


@pytest.mark.parametrize("runs, longer", [(1, 0), (2, 0), (8, 0), (12, 0), (3, 4)])
def test_no_text_of_the_plot_overlaps_or_is_cut(tmp_path, monkeypatch, runs, longer):
    from matplotlib.figure import Figure

    figures = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **options: (figures.append(self), save(self, *args, **options))
    )
    names = [f"taylor_sequential, 25 % kept, run {index}{', sequential' * longer}" for index in range(runs)]
    copies = [
        _changed(tmp_path / str(index), FULL, perplexity={"aligned": 15.0 + index, "analytic": 40 * 1.6**index})
        for index in range(runs)
    ]
    main([f"{name}={path}" for name, path in zip(names, copies)] + ["--output", str(tmp_path / "out")])
    (figure,) = figures
    renderer = figure.canvas.get_renderer()
    texts = []
    for axis in figure.axes:
        texts += [axis.title, axis.xaxis.label, axis.yaxis.label, *axis.texts, *axis.get_legend().get_texts()]
        for side, (low, high) in ((axis.xaxis, axis.get_xlim()), (axis.yaxis, sorted(axis.get_ylim()))):
            texts += [tick.label1 for tick in side.get_major_ticks() if low <= tick.get_loc() <= high]
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in texts if text.get_text()]
    assert {name for name, _ in boxes} >= set(names)
    assert _overlaps(boxes) == []
    width, height = figure.canvas.get_width_height()
    assert all(box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height for _, box in boxes)


def test_other_text_is_refused_unless_forced(tmp_path, capsys):
    quickstart = RESULTS / "quickstart"
    line = _refused(capsys, FULL, quickstart, "--output", tmp_path / "out")
    assert "'smollm2_135m' and 'quickstart' have different evaluation text" in line and "--force" in line
    assert "d75c98bbb7ea" in line and "b8dddd93d2a7" in line and not (tmp_path / "out").exists()
    main([str(FULL), str(quickstart), "--force", "--output", str(tmp_path / "out")])
    text = capsys.readouterr().out
    assert _cells(text, "quickstart")[0][2:4] == ["35.42", "93.71 (2.646x)"]
    assert "These do not compare: 'smollm2_135m' and 'quickstart'" in text
    assert "The seconds do not compare" in text and "The alignment errors do not compare" in text
    assert json.loads((tmp_path / "out" / "comparison.json").read_text())["teacher_perplexity"] is None


def test_the_same_text_cut_otherwise_or_not_recorded_is_other_text(tmp_path, capsys):
    evaluation = load_report(FULL / "report.json")["data"]["evaluation"]
    other = _changed(tmp_path / "other", FULL, data={"evaluation": {**evaluation, "seq_len": 512}})
    assert "sequences of 1024" in (line := _refused(capsys, FULL, other)) and "sequences of 512" in line
    silent = _changed(tmp_path / "silent", FULL, data={"evaluation": None})
    assert "'smollm2_135m' and 'silent'" in (line := _refused(capsys, FULL, silent)) and "no record" in line


def test_other_teacher_is_refused_and_a_rounding_is_not(tmp_path, capsys):
    other = _changed(tmp_path / "other", FULL, teacher={"perplexity": 11.7})
    line = _refused(capsys, POLISH, FULL, other)
    assert "'smollm2_135m_sequential_polish' and 'other' have different teachers" in line
    assert "11.5839 against 11.7" in line
    line = _refused(capsys, POLISH, other, FULL, "--baseline", "other")  # then all are held against the baseline
    assert "'other' and 'smollm2_135m_sequential_polish'" in line and "1 more" in line
    near = _changed(tmp_path / "near", FULL, teacher={"perplexity": 11.585})
    main([str(FULL), near])
    assert _cells(capsys.readouterr().out, "near")


def test_reports_of_another_kind_and_wrong_arguments_are_one_line(tmp_path, capsys):
    ablation = _changed(tmp_path / "ablation", FULL, recipe="ablate_initialization")
    line = _refused(capsys, FULL, ablation)
    assert "'ablate_initialization'" in line and str(tmp_path / "ablation") in line
    future = _changed(tmp_path / "future", FULL, schema=2)
    assert "schema 2" in _refused(capsys, future)
    assert "no file" in _refused(capsys, tmp_path / "nothing")
    assert "NAME=PATH" in _refused(capsys, "name=")
    assert "both named 'smollm2_135m'" in _refused(capsys, FULL, FULL)
    line = _refused(capsys, FULL, "--baseline", "none")
    assert "'none' is none of the runs: smollm2_135m" in line


def test_a_folder_may_have_an_equals_sign_in_its_name(tmp_path, capsys):
    shutil.copytree(SEQUENTIAL, tmp_path / "lr=3e-4")
    main([str(tmp_path / "lr=3e-4")])
    assert _cells(capsys.readouterr().out, "lr=3e-4")


def test_a_run_that_has_only_begun(report, tmp_path, capsys):
    report.update({"student": dict.fromkeys(("retained_layers", "converted_layers"))})
    report.update({"teacher": {"perplexity": None}, "perplexity": dict.fromkeys(report["perplexity"])})
    report.replace("alignment_error", {})
    main([str(report.output_dir), "--output", str(tmp_path / "out")])
    captured = capsys.readouterr()
    assert _cells(captured.out, "run")[1] == ["run", *"-------"]  # [0] is the header
    assert "no plot" in captured.err and not (tmp_path / "out" / "comparison.png").exists()


def test_the_command(tmp_path):
    command = [sys.executable, "-m", "tcal_components.reporting.compare", str(FULL), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.splitlines()[-1] == f"error: report: no file {tmp_path / 'report.json'}"
