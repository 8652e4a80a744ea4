"""A report with every section filled, the numbers distinct so that a test can find each of them."""

import pytest

from tcal_components.reporting import Report

RETAINED = [0, 4]
CONVERTED = [1, 2, 3, 5]


def _evaluation() -> dict:
    names = ("teacher", "hybrid")
    return {
        "models": {name: {} for name in names},
        "perplexity": {
            name: {
                "perplexity": value,
                "tokens": 1234,
                "by_position": [
                    {"from": 0, "to": 64, "tokens": 100, "perplexity": 2 * value},
                    {"from": 64, "to": 256, "tokens": 0, "perplexity": None},
                ],
            }
            for name, value in zip(names, (11.64, 12.87))
        },
        "perplexity_by_context": {name: {"256": 12.5, "512": 12.25} for name in names},
        "retrieval": [
            {"task": "copy", "model": name, "distance": d, "accuracy": 0.625, "chance": 0.001, "examples": 8}
            for name in names
            for d in (512, 1024)
        ],
        "agreement": {"hybrid": {"top1": 0.875, "kl": 0.0519, "layers": {"0": 0.0, "1": 0.3125}}},
        "speed": [
            {
                "model": name,
                "context": context,
                "batch_size": 1,
                "dtype": "bf16",
                "prefill_tokens_per_second": 4321.0,
                "decode_tokens_per_second": 87.5,
                "graph_tokens_per_second": 250.0,
                "cache_bytes": 3 * 2**20,
                "cache_bytes_theory": 3 * 2**20,
            }
            for name in names
            for context in (1024, 4096)
        ],
        "lm_eval": {name: {"tcal_local": {"acc": 0.4375}} for name in names},
    }


@pytest.fixture
def config() -> dict:
    return {"seed": 1, "align": {"steps": 10, "lr": 3e-3}, "retain": {"layers": RETAINED}}


@pytest.fixture
def report(tmp_path, config) -> Report:
    """A finished run of all stages."""
    report = Report(tmp_path / "run", "taylor_calibrate_kd", config)
    for name, tokens in (("measure", 4096), ("initialize", 0), ("align", 8192), ("distill", 16384), ("export", 0)):
        with report.stage(name) as clock:
            clock.add_tokens(tokens)
    heads = [3.0, 17.0]
    report.update(
        {
            "teacher": {"family": "llama3_2", "parameters": 134515008, "perplexity": 11.64},
            "student": {"retained_layers": RETAINED, "converted_layers": CONVERTED, "parameters": 150123456},
            "perplexity": {"naive": 14355.0, "analytic": 143.2, "aligned": 18.41, "distilled": 12.87},
            "alignment_error": {str(layer): {"first": 0.5, "last": 0.2 + layer / 100} for layer in CONVERTED},
            "tokens": {"calibration": 65536, "alignment": 819200, "distillation": 5000000},
            "half_life": {str(layer): {"before": heads, "after": heads} for layer in CONVERTED},
            "gates": {
                str(layer): {"write_before": [0.4, 0.5], "write_after": [0.6, 0.7], "output_after": 0.9}
                for layer in CONVERTED
            },
            "recovery_curve": [{"tokens": 65536, "perplexity": 143.2}, {"tokens": 5884736, "perplexity": 12.87}],
            "export": {"path": "x/export", "format": "qwen3_5_text", "max_abs_logit_diff": 3.25e-5},
            "data": {"training": {"source": "corpus/train", "documents": 77, "tokens": 5000000, "sha256": "ab" * 32}},
            "dropped": ["rotary positions of q and k"],
            "evaluation": _evaluation(),
        }
    )
    return report
