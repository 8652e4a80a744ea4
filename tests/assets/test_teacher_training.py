import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from embedded_teacher.training import FromScratchCheckpointer, TeacherMixture, stack_rows, teacher_mixture

from tcal_components.assets import asset_path
from tcal_components.checkpoint.teacher import load_teacher_state_dict
from tcal_components.data import hf_tokenizer
from tcal_components.models import teacher

ROOT = Path(__file__).resolve().parents[2]


def mixture(kind, **options):
    text = np.random.default_rng(0).integers(1, 50, 4000)
    arguments = {"vocab_size": 1000, "separator": 7, "seq_len": 256, "num_sequences": 40, "seed": 1, **options}
    return TeacherMixture(text, shares={kind: 1.0}, **arguments)


def seen_before(tokens, t):
    """Whether (tokens[t - 1], tokens[t]) stood together earlier, which is what an induction head needs."""
    return ((tokens[: t - 1] == tokens[t - 1]) & (tokens[1:t] == tokens[t])).any()


@pytest.mark.parametrize("kind", ["strings", "recall"])
def test_learned_tokens_can_be_copied_and_nothing_else_is_learned(kind):
    for item in mixture(kind):
        tokens, labels = item["tokens"], item["labels"]
        learned = labels != -100
        assert len(tokens) == 256 and 0.01 < learned.mean() < 0.95
        assert (labels[learned] == tokens[learned]).all()
        assert all(seen_before(tokens, t) for t in np.flatnonzero(learned))
        assert (tokens > 0).all() and tokens.max() < 1000


def test_passages_come_again():
    for item in mixture("passages"):
        tokens = item["tokens"]
        assert (item["labels"] == tokens).all()
        windows = [tuple(tokens[i : i + 16]) for i in range(241)]
        assert len(set(windows)) < len(windows)


def test_text_rows_are_windows_of_the_text():
    text = np.arange(1000)
    rows = TeacherMixture(
        text, vocab_size=1000, separator=7, seq_len=64, num_sequences=9, shares={"text": 1.0, "recall": 0.0}, seed=0
    )
    for item in rows:
        assert (np.diff(item["tokens"]) == 1).all() and (item["labels"] == item["tokens"]).all()


def test_items_depend_on_seed_and_index_only():
    a, b, c = mixture("strings"), mixture("strings"), mixture("strings", seed=2)
    assert (a[3]["tokens"] == b[3]["tokens"]).all()
    assert (a[3]["tokens"] != a[4]["tokens"]).any() and (a[3]["tokens"] != c[3]["tokens"]).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shares": {"poems": 1.0}}, "unknown kind in shares: poems; there are: text, strings, passages, recall"),
        ({"shares": {"text": -1.0}}, "shares must be >= 0 and not all 0"),
        ({"shares": {"text": 0.0}}, "shares must be >= 0 and not all 0"),
        ({"seq_len": 32}, "seq_len must be at least 64"),
    ],
)
def test_mixture_mistakes(options, message):
    arguments = {"source": "asset:quickstart/eval.jsonl", "num_sequences": 1, "seq_len": 64, **options}
    with pytest.raises(ValueError, match=message):
        teacher_mixture(hf_tokenizer("asset:quickstart"), **arguments)


def test_checkpointer_starts_random_and_writes_a_loadable_folder(tmp_path):
    folder = str(asset_path("quickstart"))
    weights = [
        FromScratchCheckpointer(checkpoint_dir=folder, output_dir=str(tmp_path), seed=seed).load_checkpoint()["model"]
        for seed in (0, 0, 1)
    ]
    first = weights[0]
    assert all(torch.equal(first[name], weights[1][name]) for name in first)
    assert not torch.equal(first["tok_embeddings.weight"], weights[2]["tok_embeddings.weight"])
    assert first["layers.0.attn.q_proj.weight"].std().item() == pytest.approx(192**-0.5, rel=0.03)
    assert first["layers.5.mlp.w2.weight"].std().item() == pytest.approx((512 * 12) ** -0.5, rel=0.03)
    model = teacher(checkpoint_dir=folder)
    model.load_state_dict(first)
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(
            model(torch.randint(2048, (2, 64))).flatten(0, 1), torch.randint(2048, (128,))
        )
    assert abs(loss.item() - np.log(2048)) < 0.5  # begins near the uniform distribution

    saved = tmp_path / "saved"
    FromScratchCheckpointer(checkpoint_dir=folder, output_dir=str(saved)).save_checkpoint({"model": first}, epoch=0)
    loaded = load_teacher_state_dict(saved)
    assert loaded.keys() == first.keys()
    assert all(torch.equal(loaded[name].float(), first[name].bfloat16().float()) for name in first)
    assert hf_tokenizer(saved).vocab_size == 2048


def test_checkpointer_mistakes(tmp_path):
    arguments = {"checkpoint_dir": "asset:quickstart", "output_dir": str(tmp_path)}
    with pytest.raises(ValueError, match="cannot be resumed"):
        FromScratchCheckpointer(**arguments, should_load_recipe_state=True)
    with pytest.raises(ValueError, match="checkpointer.dtype is 'fp16'; allowed: fp32, bf16"):
        FromScratchCheckpointer(**arguments, dtype="fp16")


def test_stack_rows():
    batch = stack_rows([mixture("strings")[i] for i in range(3)], padding_idx=0, ignore_idx=-100)
    assert {name: tuple(value.shape) for name, value in batch.items()} == {"tokens": (3, 256), "labels": (3, 256)}
    assert batch["tokens"].dtype == torch.int64


def test_config_trains_with_torchtunes_own_recipe(tmp_path):
    overrides = {
        "device": "cpu",
        "optimizer.fused": False,
        "batch_size": 4,
        "dataset.num_sequences": 48,
        "dataset.seq_len": 64,
        "dataset.source": "asset:quickstart/eval.jsonl",
        "dataset.shares.strings": 0,
        "dataset.shares.recall": 0,
        "lr_scheduler.num_warmup_steps": 2,
        "log_every_n_steps": 1,
        "output_dir": tmp_path,
    }
    tune = Path(sys.executable).with_name("tune")
    command = [str(tune), "run", "full_finetune_single_device", "--config", "docs/embedded_teacher/train.yaml"]
    run = subprocess.run(
        command + [f"{key}={value}" for key, value in overrides.items()],
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "docs"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    log = next((tmp_path / "logs").glob("*.txt")).read_text()
    losses = [float(line.split("loss:")[1].split()[0]) for line in log.splitlines() if "loss:" in line]
    assert len(losses) == 12 and losses[0] > 7.2 and losses[-1] < losses[0] - 0.25
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen3"
    assert torch.isfinite(load_teacher_state_dict(tmp_path)["tok_embeddings.weight"]).all()
