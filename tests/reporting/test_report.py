"""report.json: the contract, atomic writes, resuming, what JSON cannot hold."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from omegaconf import OmegaConf

from tcal_components.reporting import Report, config_sha256, load_report, sanitize, stage_result, write_json

# Written out by hand, not derived from the code: this is the contract that other programs rely on.
CONTRACT = {
    "schema": None,
    "recipe": None,
    "config_sha256": None,
    "versions": ["python", "torch", "torchtune", "torchao", "transformers", "fla", "triton", "tcal"],
    "device": None,
    "world_size": None,
    "teacher": ["family", "parameters", "perplexity"],
    "student": ["retained_layers", "converted_layers", "parameters"],
    "perplexity": ["naive", "analytic", "aligned", "distilled"],
    "alignment_error": [],
    "tokens": ["calibration", "alignment", "distillation"],
    "seconds": ["measure", "initialize", "align", "distill", "export"],
    "peak_memory_gib": ["measure", "initialize", "align", "distill", "export"],
    "tokens_per_second": ["measure", "initialize", "align", "distill", "export"],
    "export": ["path", "format", "max_abs_logit_diff", "reference_logit_max"],
}


def _read(report: Report) -> dict:
    return json.loads(report.path.read_text())


def test_every_key_of_the_contract_is_there_from_the_first_write(tmp_path, config):
    data = _read(Report(tmp_path, "a_recipe", config, world_size=2))
    for key, children in CONTRACT.items():
        assert key in data
        for child in children or []:
            assert child in data[key], f"{key}.{child}"
    assert data["schema"] == 1 and data["recipe"] == "a_recipe" and data["world_size"] == 2
    assert len(data["config_sha256"]) == 64
    assert data["versions"]["torch"] == torch.__version__
    assert data["device"].startswith("cpu")
    assert set(data["perplexity"].values()) == {None}
    assert set(data["seconds"].values()) == {None}


def test_config_hash_ignores_key_order_and_resolves():
    one = OmegaConf.create({"a": 1, "b": {"x": [2, "${a}"], "y": "${a}"}})
    other = {"b": {"y": 1, "x": [2, 1]}, "a": 1}
    assert config_sha256(one) == config_sha256(other)
    assert config_sha256(other) != config_sha256({"b": {"y": 1, "x": [1, 2]}, "a": 1})


def test_stage_records_time_tokens_and_memory(tmp_path, config):
    report = Report(tmp_path, "r", config)
    with report.stage("align") as clock:
        time.sleep(0.02)
        clock.add_tokens(100)
        clock.add_tokens(50)
        assert _read(report)["stages"]["align"] == "running"
    data = _read(report)
    assert data["stages"]["align"] == "finished" and report.finished("align") and not report.finished("distill")
    assert 0.02 <= data["seconds"]["align"] < 5
    assert data["tokens_per_second"]["align"] == pytest.approx(150 / data["seconds"]["align"], rel=0.05)
    assert data["peak_memory_gib"]["align"] > 0.01
    assert data["seconds"]["distill"] is None


def test_peak_memory_is_of_the_stage_and_not_of_the_process(tmp_path, config):
    report = Report(tmp_path, "r", config)
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("this system cannot reset the peak of resident memory")
    with report.stage("measure"):
        torch.ones(64 * 2**20)  # 256 MiB, gone at the end of the statement
    with report.stage("initialize"):
        torch.ones(1)
    peak = _read(report)["peak_memory_gib"]
    assert peak["measure"] - peak["initialize"] == pytest.approx(0.25, abs=0.08)


def test_failed_stage_leaves_a_valid_report(tmp_path, config):
    report = Report(tmp_path, "r", config)
    with pytest.raises(RuntimeError, match="out of luck"), report.stage("align"):
        raise RuntimeError("out of luck")
    data = _read(report)
    assert data["stages"]["align"] == "failed" and data["seconds"]["align"] is not None


def test_an_interruption_is_no_failure(tmp_path, config):
    report = Report(tmp_path, "r", config)
    with pytest.raises(SystemExit), report.stage("align"):
        raise SystemExit(143)
    assert _read(report)["stages"]["align"] == "interrupted" and not report.finished("align")


def test_evaluation_is_not_the_time_of_the_stage(tmp_path, config):
    report = Report(tmp_path, "r", config)
    with report.stage("align") as clock:
        clock.stop()
        time.sleep(0.1)
        report.update({"perplexity": {"aligned": 2.0}})
        assert _read(report)["stages"]["align"] == "running"
    assert _read(report)["seconds"]["align"] < 0.1


def test_nan_and_infinity_become_null(tmp_path, config):
    report = Report(tmp_path, "r", config)
    report.update({"perplexity": {"naive": float("inf"), "aligned": float("nan"), "analytic": torch.tensor(2.5)}})
    assert "NaN" not in report.path.read_text() and "Infinity" not in report.path.read_text()
    assert _read(report)["perplexity"] == {"naive": None, "analytic": 2.5, "aligned": None, "distilled": None}
    assert sanitize({1: (torch.tensor([1, 2]), {3, 1})}) == {"1": [[1, 2], [1, 3]]}
    with pytest.raises(TypeError, match="object"):
        sanitize({"x": object()})


def test_a_report_is_put_together_from_the_results_of_its_stages(tmp_path, config):
    first, result = Report(tmp_path, "r", config), stage_result(tmp_path, "align", {"align": 1})
    with first.stage("align", result=result) as clock:
        clock.add_tokens(10)
        clock.record({"perplexity": {"aligned": 18.4}})
        assert not result.path.exists(), "not before the stage has ended"
    with pytest.raises(RuntimeError), first.stage("distill", result=stage_result(tmp_path, "distill", {})):
        raise RuntimeError
    first.path.unlink()
    assert result.current() and not stage_result(tmp_path, "distill", {}).path.exists()
    again = Report(tmp_path, "r", config, results=[result, stage_result(tmp_path, "distill", {})], resume=True)
    assert again.finished("align") and again["perplexity"]["aligned"] == 18.4
    assert again["seconds"]["align"] == first["seconds"]["align"]
    assert _read(again)["perplexity"]["aligned"] == 18.4
    again.amend("align", {"perplexity": {"aligned": 17.5}})
    assert again["perplexity"]["aligned"] == _read(again)["perplexity"]["aligned"] == 17.5
    assert result.load()["report"]["perplexity"]["aligned"] == 18.4, "the result is the stage's"
    for results in ([], [stage_result(tmp_path, "align", {"align": 2})]):
        fresh = Report(tmp_path, "r", config, results=results)
        assert not fresh.finished("align") and fresh["perplexity"]["aligned"] is None


def test_resumed_stage_adds_to_its_earlier_time_and_a_fresh_one_clears_its_numbers(tmp_path, config):
    report = Report(tmp_path, "r", config)
    results = {stage: stage_result(tmp_path, stage, {"of": stage}) for stage in ("initialize", "align", "distill")}
    for stage, name in (("initialize", "analytic"), ("align", "aligned"), ("distill", "distilled")):
        with report.stage(stage, result=results[stage]) as clock:
            clock.record({"perplexity": {name: 18.4}, **({"recovery_curve": []} if stage == "distill" else {})})
    with pytest.raises(SystemExit), report.stage("align", result=results["align"]):
        # Later stages came of the alignment that is made anew.
        assert report["perplexity"] == {"naive": None, "analytic": 18.4, "aligned": None, "distilled": None}
        assert "recovery_curve" not in report.data
        assert [result.current() for result in results.values()] == [True, False, False]
        raise SystemExit(143)
    write_json(report.path, {**_read(report), "seconds": {"align": 100.0}})
    report = Report(tmp_path, "r", config, results=[results["initialize"]], resume=True)
    with report.stage("align", result=results["align"], resumed=True) as clock:
        clock.add_tokens(1024)
        assert _read(report)["seconds"]["align"] >= 100.0, "also of a run that is killed now"
    assert report["tokens_per_second"]["align"] == pytest.approx(10.24, rel=0.01)
    with report.stage("align", result=results["align"]):
        pass
    assert report["seconds"]["align"] < 100.0 and report["perplexity"]["analytic"] == 18.4


def test_only_the_first_process_writes(tmp_path, config):
    report = Report(tmp_path, "r", config, rank=1)
    with report.stage("align"):
        pass
    report.finish()
    assert list(tmp_path.iterdir()) == [] and report.finished("align")


def test_a_failure_between_write_and_rename_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    write_json(path, {"schema": 1, "n": 1})

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_json(path, {"schema": 1, "n": 2})
    assert json.loads(path.read_text())["n"] == 1
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]


def test_sigkill_at_any_moment_leaves_a_readable_report(tmp_path):
    code = (
        "import sys\nfrom tcal_components.reporting import write_json\n"
        "n = 0\n"
        "while True:\n"
        "    n += 1\n"
        "    write_json(sys.argv[1], {'schema': 1, 'n': n, 'rows': [[n] * 200] * 200})\n"
    )
    path = tmp_path / "report.json"
    process = subprocess.Popen([sys.executable, "-c", code, str(path)])
    try:
        deadline = time.monotonic() + 60
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        seen = 0
        for _ in range(40):  # a reader at arbitrary moments sees a whole file
            data = load_report(path)
            assert data["rows"] == [[data["n"]] * 200] * 200 and data["n"] >= seen
            seen = data["n"]
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    data = load_report(path)
    assert data["rows"] == [[data["n"]] * 200] * 200


@pytest.mark.parametrize("text, message", [("{", "JSON"), ('{"schema": 7}', "schema 7"), ("[]", "")])
def test_bad_report_is_one_line(tmp_path, text, message):
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        load_report(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value)
    with pytest.raises(FileNotFoundError, match="no file"):
        load_report(tmp_path / "none.json")
