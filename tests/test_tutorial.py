"""The tutorial's commands, in an empty folder one after the other, with small settings.

A block whose first line is ``# needs ...`` is left out, with that line as the reason; those of llama.cpp run where
``LLAMA_CPP_SOURCE`` and ``LLAMA_CPP_PYTHON`` name one (``docs/serving.md``).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tcal_components.serving.llama_cpp_check import EngineMissing, find_engine

TUTORIAL = Path(__file__).resolve().parents[1] / "docs" / "tutorial.md"
BLOCKS: list[tuple[str, str]] = re.findall(r"```(bash|python)\n(.*?)```", TUTORIAL.read_text(), flags=re.DOTALL)
NEEDY = [text for _, text in BLOCKS if text.startswith("# needs ")]

# What the test adds to a command, by the words that it begins with.
_TEXTS = [f"{part}.{key}" for part in ("dataset", "calibration_dataset") for key in ("seq_len=64", "max_tokens=4096")]
_TEXTS += ["validation_dataset.seq_len=64", "validation_dataset.max_tokens=1024"]
_ALIGN = ["align.steps=4", "align.batch_size=2", "align.seq_len=64", "align.eval_every=2", "align.heldout_batches=2"]
_STUDENT = ["perplexity.context_lengths=[]", "retrieval.examples=2", "retrieval.distances=[128]", "speed.contexts=[64]"]
_STUDENT += ["speed.decode_tokens=4", "generation.prompts=2", "generation.new_tokens=8", "generation.examples=2"]
SMALL = {
    "tune run recipes/select_layers": [*_TEXTS, *_ALIGN, "select.gates.steps=4"],
    "tune run recipes/taylor_calibrate_kd": [*_TEXTS, *_ALIGN, "distill.tokens=512", "distill.batch_size=2"]
    + ["generation.prompts=2", "generation.new_tokens=8"],
    "tune run recipes/evaluate_hybrid": [*_STUDENT, "validation_dataset.max_tokens=1024"],
    "python -m tcal_components.serving.llama_cpp": ["--windows", "2"],
}


def smaller(commands: str) -> str:
    """Bash commands with the small settings."""
    lines = commands.replace("\\\n", " ").splitlines()
    added = {line: words for line in lines for start, words in SMALL.items() if line.startswith(f"{start} ")}
    return "\n".join(" ".join([line, *(f"'{word}'" for word in added.get(line, ()))]) for line in lines)


def run(language: str, text: str, folder: Path) -> str:
    """What a block says; its first failing command fails."""
    (folder / "block").write_text(text if language == "python" else smaller(text))
    command = [sys.executable, "block"] if language == "python" else ["bash", "-eu", "block"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, f"{text}\n{done.stdout[-3000:]}"
    assert "Traceback" not in done.stdout, done.stdout[-3000:]
    assert not ("tune " in text and "Skipping import" in done.stdout), "torchao's line, which no one asked for"
    return done.stdout


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The folder after all blocks that need nothing, and what each of them said."""
    folder = tmp_path_factory.mktemp("tutorial")
    return folder, {block[1]: run(*block, folder) for block in BLOCKS if block[1] not in NEEDY}


def test_every_command_runs(said: tuple[Path, dict[str, str]]) -> None:
    folder, outputs = said
    out = "\n".join(outputs.values())
    assert re.search(r"layers that keep attention: \[\d, \d\]", out)
    assert re.search(r"distilled: perplexity \d+\.\d\d, \d+\.\d\d x the teacher's", out)
    # The second run made only what the first had left out.
    first, second = (said for text, said in outputs.items() if text.startswith("tune run recipes/taylor_calibrate_kd"))
    assert re.search(r"^align: +[\d.]+ s ", first, flags=re.MULTILINE) and "\nexport:" not in first
    assert re.search(r"^align: .* is up to date", second, flags=re.MULTILINE) and "\nexport: " in second
    # It ended with the command that the tutorial has next.
    command = re.search(r"^evaluate it: +(.*)$", second, flags=re.MULTILINE)
    assert command and command[1].split() in [text.replace("\\\n", " ").split() for text in outputs]
    assert "Mean recall: teacher" in (folder / "runs/mine/evaluate/report.md").read_text()
    card = (folder / "runs/mine/export/README.md").read_text()
    assert str(folder) not in card and "- training: train.jsonl" in card


@pytest.mark.parametrize("text", NEEDY, ids=[text.splitlines()[0].removeprefix("# ") for text in NEEDY])
def test_what_needs_more(text: str, request: pytest.FixtureRequest) -> None:
    if "tcal_components.serving" not in text:
        pytest.skip(text.splitlines()[0].removeprefix("# "))
    source, python = os.environ.get("LLAMA_CPP_SOURCE"), os.environ.get("LLAMA_CPP_PYTHON", sys.executable)
    try:
        find_engine(source, python)
    except EngineMissing as missing:
        pytest.skip(f"LLAMA_CPP_SOURCE and LLAMA_CPP_PYTHON give no usable llama.cpp: {missing}")
    folder: Path = request.getfixturevalue("said")[0]
    (folder / "llama.cpp").symlink_to(Path(source or "").resolve())
    assert shutil.which(python)
    assert "agrees" in run("bash", text.replace("--text", f"--python {python} --text"), folder)
