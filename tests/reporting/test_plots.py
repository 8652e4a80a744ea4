"""Plots: files of the expected size with something on them, none where there is nothing to show."""

import builtins
import struct

import numpy as np
import pytest

from tcal_components.reporting import Report, write_plots
from tcal_components.reporting.evaluation_plots import plot_retrieval
from tcal_components.reporting.plots import plot_distillation, plot_recovery, plot_report


def _size(path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])


def test_every_plot_is_drawn_and_has_ink(report, tmp_path):
    import matplotlib.image

    written = dict(write_plots(report.data, tmp_path))
    assert list(written) == [
        "report.png",
        "distillation.png",
        "half_life.png",
        "gates.png",
        "resources.png",
        "context.png",
        "retrieval.png",
        "agreement.png",
        "speed.png",
    ]
    assert _size(tmp_path / "report.png") == (1620, 600)  # two panels of 5.4 x 4 inches at 150 dots an inch
    assert _size(tmp_path / "half_life.png") == (1200, 600)
    for name in written:
        pixels = matplotlib.image.imread(tmp_path / name)[..., :3]
        assert 0.005 < (pixels < 0.5).any(axis=-1).mean() < 0.5, name
        # In grey, too, there is more than one tone beside the paper.
        grey = (pixels @ np.array([0.299, 0.587, 0.114])).round(1)
        assert len(np.unique(grey)) >= 4, name


def test_every_retrieval_task_has_its_own_chance_level(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    levels, draw = [], Axes.axhline
    monkeypatch.setattr(Axes, "axhline", lambda self, y, **style: (levels.append(y), draw(self, y, **style))[1])
    rows = [
        {"task": task, "model": "teacher", "distance": distance, "accuracy": 0.5, "chance": chance}
        for task, chance in (("needle", 0.25), ("copy", 0.001))
        for distance in (512, 1024)
    ]
    assert plot_retrieval({"evaluation": {"retrieval": rows}}, tmp_path / "retrieval.png")
    assert levels == [25.0, 0.1]


def test_nothing_to_show_writes_nothing(tmp_path, config):
    assert write_plots(Report(tmp_path / "r", "r", config).data, tmp_path / "plots") == []
    assert list((tmp_path / "plots").iterdir()) == []


@pytest.mark.parametrize("missing", ["alignment_error", "perplexity"])
def test_one_panel_alone(report, tmp_path, missing):
    report.data[missing] = {}
    assert plot_report(report.data, tmp_path / "one.png")
    assert _size(tmp_path / "one.png") == (810, 600)


def test_naive_alone_without_teacher(report, tmp_path):
    report.data["perplexity"] = {"naive": 10.0, "analytic": None, "aligned": None, "distilled": None}
    report.data["teacher"]["perplexity"] = None
    report.data["alignment_error"] = {"3": {"first": 0.5, "last": None}}
    assert plot_report(report.data, tmp_path / "p.png")


def test_named_recovery_curves(report, tmp_path):
    rows = [{"tokens": 10, "perplexity": 100.0}, {"tokens": 1000, "perplexity": 20.0}]
    report.data["recovery_curve"] = {f"start {index}": rows for index in range(7)}
    assert plot_recovery(report.data, tmp_path / "p.png")
    assert not plot_distillation(report.data, tmp_path / "d.png")  # which is of one student


def _numbers(axis) -> list[list[str]]:
    """The numbers that stand on both sides of a plot."""
    axis.figure.canvas.draw()
    sides = ((axis.xaxis, axis.get_xlim()), (axis.yaxis, sorted(axis.get_ylim())))
    return [
        [t.label1.get_text() for t in side.get_major_ticks() if low <= t.get_loc() <= high and t.label1.get_text()]
        for side, (low, high) in sides
    ]


@pytest.fixture
def figures(monkeypatch):
    """Every figure that is saved."""
    from matplotlib.figure import Figure

    found, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **options: (found.append(self), save(self, *a, **options)))
    return found


@pytest.mark.parametrize("scale", [1.0, 1.003, 1.3, 40.0])
def test_every_axis_has_numbers(report, tmp_path, figures, scale):
    """Whether the values lie within one decade or over several."""
    data = report.data
    heads = {"before": [3.0, 3.0 * scale], "after": [3.1, 3.1 * scale]}
    data["half_life"] = dict.fromkeys(data["half_life"], heads)
    data["perplexity"] = {"naive": 11.7 * scale, "analytic": 11.7, "aligned": 11.7, "distilled": 11.7}
    data["recovery_curve"] = [{"tokens": 65536, "perplexity": 11.7 * scale}, {"tokens": 99999, "perplexity": 11.7}]
    write_plots(data, tmp_path)
    curve = [{"tokens": 100, "perplexity": 11.8 * scale}, {"tokens": 100 * (1 + scale), "perplexity": 11.8}]
    assert plot_recovery({**data, "recovery_curve": {"one": curve}}, tmp_path / "recovery.png")
    assert len(figures) == 10
    for axis in (axis for figure in figures for axis in figure.axes):
        few = 1 if axis.get_xlabel().startswith(("context", "position")) else 2  # one length, one bucket
        assert min(map(len, _numbers(axis))) >= few, (axis.get_title(), axis.get_xlabel(), _numbers(axis))


def test_layers_that_keep_attention_are_marked(report, tmp_path, figures):
    write_plots(report.data, tmp_path)
    by_layer = [axis for figure in figures for axis in figure.axes if axis.get_xlabel() == "layer"]
    assert len(by_layer) == 5  # errors, half-lives, two gates, agreement
    for axis in by_layer:
        shaded = [patch for patch in axis.patches if patch.get_width() == 1]
        assert [patch.get_x() + 0.5 for patch in shaded] == [0, 4]
        assert "keeps attention" in axis.get_legend_handles_labels()[1]


def test_the_distillation_is_drawn_against_its_own_tokens_with_the_teacher_as_a_line(report, tmp_path, figures):
    assert plot_distillation(report.data, tmp_path / "d.png")
    (axis,) = figures[0].axes
    student, teacher = axis.get_lines()
    assert list(student.get_xdata()) == [0, 5884736 - 65536] and list(student.get_ydata()) == [143.2, 12.87]
    assert list(teacher.get_ydata()) == [11.64, 11.64] and teacher.get_label() == "teacher: 11.6"
    assert axis.texts[0].get_text() == "12.87\n(1.106 x)"
    assert not plot_distillation({**report.data, "recovery_curve": []}, tmp_path / "none.png")


@pytest.mark.parametrize("teacher, drawn", [(8.0, [1150.0, 150.0]), (25.0, [100.0, 20.0]), (None, [100.0, 20.0])])
def test_recovery_is_what_is_missing_to_the_teacher(report, tmp_path, monkeypatch, teacher, drawn):
    from matplotlib.axes import Axes

    lines, plot = [], Axes.plot

    def record(axis, x, y, **style):
        lines.append(list(y))
        return plot(axis, x, y, **style)

    monkeypatch.setattr(Axes, "plot", record)
    rows = [{"tokens": 10, "perplexity": 100.0}, {"tokens": 1000, "perplexity": 20.0}]
    report.data["recovery_curve"] = {"a start": rows}
    report.data["teacher"]["perplexity"] = teacher
    assert plot_recovery(report.data, tmp_path / "p.png")
    assert lines == [pytest.approx(drawn)]


def test_long_recovery_curves_keep_markers_apart(report, tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    drawn, plot = {}, Axes.plot

    def record(axis, x, y, **style):
        drawn[style["label"]] = style["markevery"]
        return plot(axis, x, y, **style)

    monkeypatch.setattr(Axes, "plot", record)
    curves = {n: [{"tokens": 1000 * i, "perplexity": 20.0 + 80 / i} for i in range(1, n)] for n in (6, 200)}
    report.data["recovery_curve"] = {f"{n} points": rows for n, rows in curves.items()}
    assert plot_recovery(report.data, tmp_path / "p.png")
    assert drawn["6 points"] is None and 0 < drawn["200 points"] < 1


def test_without_matplotlib_there_is_a_line_and_no_plot(report, tmp_path, monkeypatch, caplog):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert write_plots(report.data, tmp_path / "plots") == []
    assert "pip install matplotlib" in caplog.text
