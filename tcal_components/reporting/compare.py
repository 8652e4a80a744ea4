"""Several runs of ``taylor_calibrate_kd`` side by side, from their ``report.json``.

    python -m tcal_components.reporting.compare RUN [RUN ...] [--output DIR] [--baseline NAME] [--force]

RUN is the folder of a run, its ``report.json``, or ``NAME=PATH``. Runs compare only where they have the same teacher and were
evaluated on the same text; others are refused with one line, unless ``--force`` is given.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tcal_components.checkpoint.files import write_json
from tcal_components.config import one_line_errors
from tcal_components.reporting._format import short_number, short_tokens, table
from tcal_components.reporting.compare_plot import plot_comparison
from tcal_components.reporting.report import STAGES, load_report

RECIPE = "taylor_calibrate_kd"
PERPLEXITIES = {"naive": "naive", "analytic": "initialized", "aligned": "aligned", "distilled": "distilled"}
TOKENS = ("calibration", "alignment", "distillation")
# A teacher's perplexity moves by less between machines, batch sizes and bf16 kernels.
TEACHER_TOLERANCE = 1e-3


def read_run(argument: str) -> tuple[str, Path, dict[str, Any]]:
    """Reads a run as the command line names it.

    Args:
        argument: a folder with ``report.json``, a ``report.json``, or ``NAME=PATH``.

    Returns:
        name (without NAME= that of the run's folder), path of the report, its content.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no report, or of another schema or recipe.
    """
    name, path = "", Path(argument)
    if "=" in argument and not path.exists():  # a folder may have = in its name
        name, _, rest = argument.partition("=")
        path = Path(rest)
        if not name or not rest:
            raise ValueError(f"compare: {argument!r} should be NAME=PATH")
    if path.is_dir():
        path = path / "report.json"
    report = load_report(path)
    if report.get("recipe") != RECIPE:
        raise ValueError(f"compare: {path} is of recipe {report.get('recipe')!r}, only those of {RECIPE!r} compare")
    return name or path.resolve().parent.name, path, report


def read_runs(arguments: Sequence[str]) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Reads all runs; see :func:`read_run`.

    Raises:
        ValueError: If two runs have one name.
    """
    runs: dict[str, tuple[Path, dict[str, Any]]] = {}
    for argument in arguments:
        name, path, report = read_run(argument)
        if name in runs:
            raise ValueError(f"compare: {runs[name][0]} and {path} are both named {name!r}; name one with NAME=PATH")
        runs[name] = (path, report)
    return runs


def _same_teacher(one: float, other: float) -> bool:
    return abs(other / one - 1) <= TEACHER_TOLERANCE


def _text(report: Mapping[str, Any], role: str) -> tuple[Any, ...] | None:
    """What identifies a part of the text: its tokens and how they are cut."""
    row = (report.get("data") or {}).get(role) or {}
    return (row["sha256"], row.get("seq_len")) if row.get("sha256") else None


def _describe_text(report: Mapping[str, Any]) -> str:
    row = (report.get("data") or {}).get("evaluation") or {}
    if not row.get("sha256"):
        return "no record of it"
    return (
        f"{row.get('source')}, {short_number(row.get('tokens') or 0)} tokens in sequences of {row.get('seq_len')}, "
        f"sha256 {row['sha256'][:12]}"
    )


def differences(reports: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What forbids to compare runs with the first of them.

    Args:
        reports: content of ``report.json`` by run.

    Returns:
        One line a difference, naming both runs and both values; empty where all compare.
    """
    (first, reference), *others = reports.items()
    found = []
    for name, report in others:
        text = _text(report, "evaluation")
        if text is None or text != _text(reference, "evaluation"):
            found.append(
                f"{first!r} and {name!r} have different evaluation text: {_describe_text(reference)} against "
                f"{_describe_text(report)}"
            )
            continue  # then the teacher's perplexity differs too
        mine, yours = reference["teacher"]["perplexity"], report["teacher"]["perplexity"]
        if mine and yours and not _same_teacher(mine, yours):
            found.append(
                f"{first!r} and {name!r} have different teachers: perplexity {short_number(mine, 6)} against "
                f"{short_number(yours, 6)} on the same text"
            )
    return found


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value and base else None


def _row(name: str, path: Path, report: Mapping[str, Any]) -> dict[str, Any]:
    student, teacher = report["student"], report["teacher"]["perplexity"]
    retained, converted = student["retained_layers"], student["converted_layers"]
    perplexity = {stage: report["perplexity"].get(stage) for stage in PERPLEXITIES}
    errors = [row["last"] for row in report["alignment_error"].values() if row.get("last") is not None]
    return {
        "name": name,
        "path": str(path),
        "config_sha256": report["config_sha256"],
        "device": report["device"],
        "world_size": report["world_size"],
        "retained_layers": retained,
        "state_bytes": student.get("state_bytes"),
        "layers": None if retained is None or converted is None else len(retained) + len(converted),
        "teacher_perplexity": teacher,
        "perplexity": perplexity,
        "ratio_to_teacher": {stage: _ratio(value, teacher) for stage, value in perplexity.items()},
        "alignment_error": sum(errors) / len(errors) if errors else None,
        "tokens": {key: report["tokens"].get(key) for key in TOKENS},
        "seconds": {stage: report["seconds"].get(stage) for stage in STAGES},
        "unfinished": {stage: state for stage, state in report["stages"].items() if state != "finished"},
        "recovery_curve": report.get("recovery_curve") or [],
    }


def compare(runs: Mapping[str, tuple[Path, Mapping[str, Any]]], *, baseline: str | None = None) -> dict[str, Any]:
    """The numbers of all runs.

    Args:
        runs: path and content of ``report.json`` by run; they should compare, see :func:`differences`.
        baseline: the run that comes first and that the others' perplexity is divided by.

    Returns:
        Content of ``comparison.json``: ``runs`` (a list, one entry a run), ``teacher_perplexity`` (None where the runs have
        no common one), ``baseline``, ``notes``.
    """
    rows = [_row(name, path, report) for name, (path, report) in runs.items()]
    if baseline is not None:
        rows.sort(key=lambda row: row["name"] != baseline)
        for row in rows:
            stage = next((s for s in reversed(PERPLEXITIES) if row["perplexity"][s] and rows[0]["perplexity"][s]), None)
            value = None if stage is None else row["perplexity"][stage] / rows[0]["perplexity"][stage]
            row["ratio_to_baseline"] = {"stage": stage, "ratio": value}
    reports = [report for _, report in runs.values()]
    notes = []
    if len({tuple(row["retained_layers"] or ()) for row in rows}) > 1 and any(row["alignment_error"] for row in rows):
        notes.append("The alignment error is the mean over each run's own converted layers, which differ between runs.")
    if len({_text(report, "heldout") for report in reports if report["alignment_error"]}) > 1:
        notes.append("The alignment errors do not compare: the runs have different held-out text.")
    if len({(row["device"], row["world_size"]) for row in rows}) > 1:
        notes.append("The seconds do not compare: the runs ran on different devices.")
    teachers = [row["teacher_perplexity"] for row in rows if row["teacher_perplexity"]]
    common = bool(teachers) and all(_same_teacher(teachers[0], other) for other in teachers)
    return {
        "kind": "comparison",
        "teacher_perplexity": teachers[0] if common else None,
        "baseline": baseline,
        "notes": notes,
        "runs": rows,
    }


def states_differ(comparison: Mapping[str, Any]) -> bool:
    """Whether the runs' students keep states of different size, as with other head sizes or convolutions."""
    return len({row["state_bytes"] for row in comparison["runs"] if row["state_bytes"]}) > 1


def perplexity_table(comparison: Mapping[str, Any]) -> str:
    """One row a run: layers, perplexities with their ratio to the teacher's, alignment error, state where it differs."""
    baseline, states = comparison["baseline"], states_differ(comparison)
    header = ["run", "layers that keep attention", "teacher", *PERPLEXITIES.values(), "alignment error"]
    header += ["state a sequence (KiB)"] if states else []
    header += [f"ratio to {baseline}"] if baseline is not None else []
    rows = []
    for row in comparison["runs"]:
        kept = None if row["layers"] is None else f"{len(row['retained_layers'])}/{row['layers']}"
        cells: list[Any] = [row["name"], kept, row["teacher_perplexity"]]
        for stage in PERPLEXITIES:
            value, ratio = row["perplexity"][stage], row["ratio_to_teacher"][stage]
            text = None if value is None else short_number(value, 4)
            cells.append(f"{text} ({short_number(ratio, 4)}x)" if ratio else text)
        cells.append(None if row["alignment_error"] is None else short_number(row["alignment_error"]))
        if states:
            cells.append(None if row["state_bytes"] is None else short_number(row["state_bytes"] / 1024, 4))
        if baseline is not None:
            found = row["ratio_to_baseline"]
            text = f"{short_number(found['ratio'], 4)}x {PERPLEXITIES[found['stage']]}" if found["ratio"] else None
            cells.append(text)
        rows.append(cells)
    return table(header, rows)


def cost_table(comparison: Mapping[str, Any]) -> str:
    """One row a run: tokens and seconds of each stage, the device."""
    rows = []
    for row in comparison["runs"]:
        cells: list[Any] = [row["name"]]
        cells += [None if row["tokens"][key] is None else short_tokens(row["tokens"][key]) for key in TOKENS]
        for stage, seconds in row["seconds"].items():
            state = row["unfinished"].get(stage)
            text = None if seconds is None else short_number(seconds)
            cells.append(f"{text or '-'} ({state})" if state else text)
        processes = f"{row['world_size']} x " if row["world_size"] != 1 else ""
        rows.append([*cells, f"{processes}{row['device']}"])
    return table(("run", *(f"{key} tokens" for key in TOKENS), *(f"{stage} (s)" for stage in STAGES), "device"), rows)


def comparison_markdown(comparison: Mapping[str, Any], *, plot: str | None = None) -> str:
    """``comparison.md``.

    Args:
        comparison: what :func:`compare` returned.
        plot: relative path of the plot.

    Returns:
        Markdown.
    """
    legend = "Held-out perplexity after each stage, in brackets its ratio to the teacher's; `-`: the stage has not run."
    if comparison["baseline"] is not None:
        legend += f" Ratio to {comparison['baseline']}: of the last stage that both have."
    parts = ["# Comparison of runs", "## Perplexity", legend, perplexity_table(comparison)]
    parts += [f"![Perplexity by stage, and against the tokens spent]({plot})"] if plot else []
    parts += ["## Tokens and time", cost_table(comparison)]
    if comparison["notes"]:
        parts += ["## Notes", "\n".join(f"- {note}" for note in comparison["notes"])]
    return "\n\n".join(parts) + "\n"


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    description, _, more = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m tcal_components.reporting.compare", description=description, epilog=more.split("\n\n")[-1]
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, its report.json, or NAME=PATH")
    parser.add_argument("--output", type=Path, metavar="DIR", help="write comparison.json, .md and .png there")
    parser.add_argument("--baseline", metavar="NAME", help="run that comes first and that the others are divided by")
    parser.add_argument("--force", action="store_true", help="compare runs of different text or teachers all the same")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line; a user's mistake is one line on stderr and exit status 2."""
    args = _arguments(argv)
    with one_line_errors():
        runs = read_runs(args.runs)
        if args.baseline is not None and args.baseline not in runs:
            raise ValueError(f"compare: --baseline {args.baseline!r} is none of the runs: {', '.join(runs)}")
        reports = {name: report for name, (_, report) in runs.items()}
        if args.baseline is not None:
            reports = {args.baseline: reports[args.baseline], **reports}
        found = differences(reports)
        if found and not args.force:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise ValueError(f"compare: {found[0]}{more}; --force compares them all the same")
        if args.output is not None:
            args.output.mkdir(parents=True, exist_ok=True)
    comparison = compare(runs, baseline=args.baseline)
    comparison["notes"] = [f"These do not compare: {line}." for line in found] + comparison["notes"]
    print(comparison_markdown(comparison), end="")
    if args.output is not None:
        drawn = plot_comparison(comparison, args.output / "comparison.png")
        text = comparison_markdown(comparison, plot="comparison.png" if drawn else None)
        (args.output / "comparison.md").write_text(text, encoding="utf-8")
        write_json(args.output / "comparison.json", comparison)
        if not drawn:
            print("compare: no plot: no run has a perplexity, or matplotlib is not installed", file=sys.stderr)


if __name__ == "__main__":
    main()
