"""A config of ``taylor_calibrate_kd`` on a few short texts, and what its check says."""

import json
import shutil

import pytest
from omegaconf import OmegaConf

from tcal_components.assets import asset_path
from tcal_components.pipeline.config import COMPONENTS, KEYS, PipelineConfig
from tcal_components.setup import Workbench

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Texts, samples, and the embedded teacher's tokenizer with a chat template, which it does not have itself."""
    root = tmp_path_factory.mktemp("inputs")
    text = json.loads((asset_path("quickstart") / "eval.jsonl").read_text().splitlines()[0])["text"]
    rows = [json.dumps({"text": text[i * 600 : (i + 1) * 600]}) for i in range(40)]
    (root / "all.jsonl").write_text("\n".join(rows) + "\n")
    samples = [
        {"instruction": f"Say {i}.", "input": "", "output": f"{text[i * 50 : i * 50 + 40 + i]}"} for i in range(80)
    ]
    (root / "instruct.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    turns = [
        {"messages": [{"role": "user", "content": s["instruction"]}, {"role": "assistant", "content": s["output"]}]}
        for s in samples
    ]
    (root / "chat.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    (root / "tokenizer").mkdir()
    shutil.copy(asset_path("quickstart") / "tokenizer.json", root / "tokenizer")
    settings = json.loads((asset_path("quickstart") / "tokenizer_config.json").read_text())
    (root / "tokenizer/tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return root


@pytest.fixture
def config(folder, tmp_path):
    """The config without torchtune's keys; ``config(distill={...}, **changes)``."""

    def make(**changes):
        teacher = str(asset_path("quickstart"))
        part = {
            "_component_": "tcal_components.data.packed_text",
            "source": str(folder / "all.jsonl"),
            "seq_len": 32,
            "max_tokens": 512,
        }
        return OmegaConf.create(
            {
                "output_dir": str(tmp_path / "out"),
                "stages": ["measure", "initialize", "distill"],
                "teacher_checkpointer": {
                    "_component_": "tcal_components.checkpoint.teacher.HFTeacherCheckpointer",
                    "checkpoint_dir": teacher,
                },
                "teacher_model": {"_component_": "tcal_components.models.teacher", "checkpoint_dir": teacher},
                "model": {"_component_": "tcal_components.models.hybrid", "checkpoint_dir": teacher},
                "tokenizer": {"_component_": "tcal_components.data.hf_tokenizer", "path": str(folder / "tokenizer")},
                "retain": {"layers": [0, 3]},
                "calibration_dataset": part,
                "dataset": {**part, "skip_tokens": 2048},
                "validation_dataset": {**part, "skip_tokens": 4096},
                "align": {"seq_len": 32, "batch_size": 4, "heldout_batches": 2},
                "distill": {"tokens": 256, "batch_size": 4},
                "generation": None,
                **changes,
            }
        )

    return make


@pytest.fixture
def checked():
    """Runs the check that a run begins with; returns the parsed config and what was set up from it."""

    def check(cfg):
        parsed = PipelineConfig(cfg)
        bench = Workbench(cfg, extra_keys=KEYS, extra_components=COMPONENTS)
        parsed.complete(bench)
        return parsed, bench

    return check
