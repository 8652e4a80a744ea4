"""lm-evaluation-harness on exported folders, through its Python API (optional extra ``eval``)."""

from __future__ import annotations

import importlib.util
import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tcal_components.evaluation.load import exports_compute

_log = logging.getLogger(__name__)

LOCAL_TASK = "tcal_local"
# The RULER tasks of lm-eval 0.4.13 that make their own text; the others download essays or question sets.
OFFLINE_RULER_TASKS = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_vt", "ruler_cwe", "ruler_fwe")

_WORDS = ("red", "green", "blue", "white", "black", "north", "south", "east", "west", "one", "two", "three")


def check_installed() -> None:
    """Raises one clear line when lm-eval is missing, or what its backend for transformers needs besides.

    Raises:
        ValueError: With the command that installs it.
    """
    for package, name in (("lm_eval", "lm-eval"), ("accelerate", "accelerate, which lm-eval needs for transformers,")):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"{name} is not installed: pip install 'taylor-calibrate[eval]'")


def local_documents(count: int = 40) -> list[dict[str, Any]]:
    """Questions of the local task: six words, the first five again, which word comes next? Four choices."""
    rng = random.Random(0)
    documents = []
    for _ in range(count):
        words = rng.sample(_WORDS, 6)
        choices = rng.sample(words[:5], 3) + [words[5]]
        rng.shuffle(choices)
        text = " ".join([*words, *words[:5]])
        documents.append({"text": text, "choices": choices, "label": choices.index(words[5])})
    return documents


def _local_dataset(**_: Any) -> dict[str, Any]:
    import datasets

    return {"test": datasets.Dataset.from_list(local_documents())}


def local_task() -> dict[str, Any]:
    """Config of ``tcal_local``, a task without any download: continuing a repeated list of words, chance 25 %."""
    return {
        "task": LOCAL_TASK,
        "custom_dataset": _local_dataset,
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1.0},
    }


def check_tasks(tasks: Sequence[str]) -> None:
    """Refuses names that lm-eval does not know.

    Raises:
        ValueError: Naming the first unknown task.
    """
    check_installed()
    from lm_eval.tasks import TaskManager

    known = set(TaskManager().all_tasks)
    for task in tasks:
        if task != LOCAL_TASK and task not in known:
            offline = ", ".join((LOCAL_TASK, *OFFLINE_RULER_TASKS))
            raise ValueError(
                f"unknown lm-eval task {task!r}; without download: {offline}; all others: `lm-eval ls tasks`"
            )


def lm_eval_scores(
    folder: str | Path,
    *,
    tasks: Sequence[str],
    dtype: str = "bfloat16",
    device: str = "cpu",
    batch_size: int | str = 8,
    limit: float | None = None,
    num_fewshot: int | None = None,
    max_seq_lengths: Sequence[int] | None = None,
    trust_remote_code: bool = False,
    seed: int = 0,
) -> dict[str, dict[str, float]]:
    """Runs lm-eval's ``hf`` model on a folder that transformers loads.

    Args:
        folder: Exported student or teacher checkpoint, with its tokenizer.
        tasks: lm-eval tasks (or groups), and ``tcal_local``.
        dtype: Type of the weights.
        device: Where to compute.
        batch_size: Sequences a forward, or ``"auto"``.
        limit: Only the first so many questions of each task and length.
        num_fewshot: Examples before each question; the task's own number if None.
        max_seq_lengths: Context lengths of RULER tasks, 4096 if None.
        trust_remote_code: Run the modeling file of the folder (``format: hf_custom``).
        seed: Of everything random.

    Returns:
        dict: ``{task: {metric: value}}`` without standard errors; lengths that RULER did not run are left out.

    Raises:
        ValueError: If lm-eval is not installed or a task is unknown.
        FileNotFoundError: If there is no such folder.
    """
    check_tasks(tasks)
    if not (Path(folder) / "config.json").is_file():
        raise FileNotFoundError(f"lm-eval: {folder} is no model folder (no config.json)")
    import lm_eval
    from lm_eval.api.registry import get_model

    model = get_model("hf").create_from_arg_obj(
        {"pretrained": str(folder), "dtype": dtype, "trust_remote_code": trust_remote_code},
        {"batch_size": batch_size, "device": device},
    )
    lengths = None if max_seq_lengths is None else [int(length) for length in max_seq_lengths]
    # lm-eval counts a limit over all lengths of a task: with several, it would run the first alone.
    runs = [lengths] if limit is None or not lengths else [[length] for length in lengths]
    scores: dict[str, dict[str, float]] = {}
    for run in runs:
        metadata: dict[str, Any] = {"pretrained": str(folder)}  # RULER sizes its texts with the model's tokenizer
        if run is not None:
            metadata["max_seq_lengths"] = run
        with exports_compute(torch.device(device), model.model):
            results = lm_eval.simple_evaluate(
                model=model,
                tasks=[local_task() if task == LOCAL_TASK else task for task in tasks],
                limit=limit,
                num_fewshot=num_fewshot,
                bootstrap_iters=0,
                log_samples=False,
                random_seed=seed,
                numpy_random_seed=seed,
                torch_random_seed=seed,
                fewshot_random_seed=seed,
                metadata=metadata,
            )
        for task, row in _scores(results["results"]).items():
            scores.setdefault(task, {}).update(row)
    return scores


def _scores(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """``{"acc,none": 0.5, "acc_stderr,none": ...}`` -> ``{"acc": 0.5}``; RULER marks lengths it did not run by -1."""
    scores: dict[str, dict[str, float]] = {}
    for task, row in results.items():
        for key, value in row.items():
            name, _, filtered = key.partition(",")
            if not filtered or "stderr" in name or not isinstance(value, (int, float)):
                continue
            if name.isdigit() and value < 0:
                continue
            label = name if filtered == "none" else f"{name} ({filtered})"
            scores.setdefault(task, {})[label] = float(value)
    return scores
