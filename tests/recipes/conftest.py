"""A tiny teacher on disk and a way to run recipes in this process."""

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from killed_runs import short_run, short_texts
from omegaconf import OmegaConf

from tcal_components.assets import asset_path

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def random_teacher(tmp_path_factory):
    """Folder of a Qwen3 of four small layers with random weights, written by transformers, with the quickstart's tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("teacher")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=2048,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(asset_path("quickstart") / name, folder / name)
    return folder


@pytest.fixture(scope="session")
def load_recipe():
    """A recipe's module, by name."""

    def load(name):
        key = f"recipe_{name}"
        if key not in sys.modules:
            spec = importlib.util.spec_from_file_location(key, ROOT / "recipes" / f"{name}.py")
            sys.modules[key] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[key])
        return sys.modules[key]

    return load


@pytest.fixture
def small_config(random_teacher, tmp_path):
    """A config of the repository with the random teacher, short text and changes."""

    def make(name, *changes, output=tmp_path / "out"):
        cfg = OmegaConf.load(ROOT / "configs" / f"{name}.yaml")
        small = [f"output_dir={output}", f"teacher_checkpointer.checkpoint_dir={random_teacher}"]
        for part in ("calibration_dataset", "dataset", "validation_dataset"):
            small += [f"{part}.seq_len=64", f"{part}.max_tokens=512"]
        small += ["align.steps=4", "align.batch_size=2", "align.seq_len=64", "align.eval_every=2"]
        small += ["align.heldout_batches=2"]
        return OmegaConf.merge(cfg, OmegaConf.from_dotlist([*small, *changes]))

    return make


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """Folder with calibration.jsonl, train.jsonl and eval.jsonl: short, different documents of the embedded text."""
    return short_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="session")
def quick_args(texts):
    """Command line of a run of all stages on the embedded teacher in a few seconds."""
    return functools.partial(short_run, texts)


@pytest.fixture(scope="session")
def run_main(load_recipe):
    """Runs the main recipe in this process with a command line."""

    def run(args):
        before, sys.argv = sys.argv, ["taylor_calibrate_kd", *args]
        try:
            load_recipe("taylor_calibrate_kd").recipe_main()
        except SystemExit as end:
            if end.code:
                raise
        finally:
            sys.argv = before

    return run


@pytest.fixture(scope="session")
def tune():
    """Runs the `tune` command in a process of its own, with this project's recipes."""
    code = (
        "from tcal_components.plugin.tune_hook import install; install(); from torchtune._cli.tune import main; main()"
    )

    def run(folder, *args):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        return subprocess.run(
            [sys.executable, "-c", code, *map(str, args)],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run
