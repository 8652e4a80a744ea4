"""lm-evaluation-harness on exported folders, through its Python API (optional extra ``eval``)."""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tcal_components.data import hf_tokenizer
from tcal_components.evaluation.code_tests import local_code_eval
from tcal_components.evaluation.load import exports_compute

_log = logging.getLogger(__name__)

LOCAL_TASK = "tcal_local"
# The RULER tasks of lm-eval 0.4.13 that make their own text; the others download essays or question sets.
OFFLINE_RULER_TASKS = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_vt", "ruler_cwe", "ruler_fwe")

Files = Mapping[str, Mapping[str, str]]
_CODE_TASKS = ("humaneval", "mbpp")
_JSON = (".json", ".jsonl", ".json.gz", ".jsonl.gz")

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


@functools.cache
def _tasks() -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager()  # which reads thousands of files


def check_tasks(tasks: Sequence[str], files: Files | None = None, *, allow_code_execution: bool = False) -> None:
    """Refuses names that lm-eval does not know, and files that are not there.

    Args:
        tasks: lm-eval tasks (or groups), .yaml files of tasks, and ``tcal_local``.
        files: By task, the local file of each split.
        allow_code_execution: Whether programs that a model writes may run.

    Raises:
        ValueError: Naming the first unknown task, one that would run programs, or a file of a kind that is not read.
        FileNotFoundError: For a file that does not exist.
    """
    check_installed()
    for task in tasks:
        if task not in (LOCAL_TASK, *_tasks().all_tasks) and not (task.endswith(".yaml") and Path(task).is_file()):
            offline = ", ".join((LOCAL_TASK, *OFFLINE_RULER_TASKS))
            raise ValueError(
                f"unknown lm-eval task {task!r}; without download: {offline}; all others: `lm-eval ls tasks`, or the "
                "path of a task's .yaml file"
            )
        if task.startswith(_CODE_TASKS) and not allow_code_execution:
            raise ValueError(
                f"the task {task} runs the programs that a model writes; allow_code_execution=true allows that, on a "
                "machine where they can do no harm"
            )
    for task, splits in (files or {}).items():
        if task not in tasks or task not in _tasks().all_subtasks:
            raise ValueError(f"files of the task {task!r}, expected one of lm-eval's own among the tasks {list(tasks)}")
        _local_files(task, splits)


def local_files_task(task: str, splits: Mapping[str, str], folder: str | Path) -> str:
    """A task of lm-eval that reads its questions from local files in place of downloading them.

    Args:
        task: Its name.
        splits: The file of each split.
        folder: Where to write the task's .yaml file.

    Returns:
        str: The path of that file, which lm-eval takes in place of the name.
    """
    # lm-eval 0.4.13 does not merge a dict with the config of the task that it names; a file may include it.
    config = {"include": str(_tasks().task_index[task].yaml_path), "task": task, **_local_files(task, splits)}
    path = Path(folder) / f"{task}.yaml"
    path.write_text(json.dumps(config))  # which is YAML too
    return str(path)


def _local_files(task: str, splits: Mapping[str, str]) -> dict[str, Any]:
    kinds = set()
    for split, name in splits.items():
        if not Path(name).is_file():
            raise FileNotFoundError(f"lm_eval.files.{task}.{split}: {name} does not exist")
        kind = "parquet" if name.endswith(".parquet") else "json" if name.endswith(_JSON) else None
        if kind is None:
            raise ValueError(f"lm_eval.files.{task}.{split}: {name} is none of {', '.join((*_JSON, '.parquet'))}")
        kinds.add(kind)
    if len(kinds) != 1:
        raise ValueError(
            f"lm_eval.files.{task}: expected files of one kind, got {', '.join(splits.values()) or 'none'}"
        )
    data = {split: str(Path(name).resolve()) for split, name in splits.items()}
    return {"dataset_path": kinds.pop(), "dataset_name": None, "dataset_kwargs": {"data_files": data}}


class LmEvalResult(NamedTuple):
    """What lm-eval found of one model.

    Attributes:
        scores: ``{task: {metric: value}}`` without standard errors; lengths that RULER did not run are left out.
        answers: Of the tasks whose answers are generated, the first metric of each example, in the same order for all
            models.
    """

    scores: dict[str, dict[str, float]]
    answers: dict[str, list[float]]


def lm_eval_results(
    folder: str | Path,
    *,
    tasks: Sequence[str],
    dtype: str = "bfloat16",
    device: str = "cpu",
    batch_size: int | str = 8,
    limit: float | None = None,
    num_fewshot: int | None = None,
    max_seq_lengths: Sequence[int] | None = None,
    files: Files | None = None,
    allow_code_execution: bool = False,
    trust_remote_code: bool = False,
    seed: int = 0,
) -> LmEvalResult:
    """Runs lm-eval's ``hf`` model on a folder that transformers loads.

    Args:
        folder: Exported student or teacher checkpoint, with its tokenizer.
        tasks: lm-eval tasks (or groups), .yaml files of tasks, and ``tcal_local``.
        dtype: Type of the weights.
        device: Where to compute.
        batch_size: Sequences a forward, or ``"auto"``.
        limit: Only the first so many questions of each task and length.
        num_fewshot: Examples before each question; the task's own number if None.
        max_seq_lengths: Context lengths of RULER tasks, 4096 if None.
        files: By task, the local file of each split, for tasks that would download their questions.
        allow_code_execution: Run the programs that the model writes (humaneval, mbpp), see
            :mod:`tcal_components.evaluation.code_tests`.
        trust_remote_code: Run the modeling file of the folder (``format: hf_custom``).
        seed: Of everything random.

    Returns:
        LmEvalResult: Scores, and generated answers by example.

    Raises:
        ValueError: If lm-eval is not installed or a task is unknown.
        FileNotFoundError: If there is no such folder or file.
    """
    check_tasks(tasks, files, allow_code_execution=allow_code_execution)
    if not (Path(folder) / "config.json").is_file():
        raise FileNotFoundError(f"lm-eval: {folder} is no model folder (no config.json)")
    import lm_eval
    from lm_eval.api.registry import get_model

    model = get_model("hf").create_from_arg_obj(
        {"pretrained": str(folder), "dtype": dtype, "trust_remote_code": trust_remote_code},
        {"batch_size": batch_size, "device": device},
    )
    begin = hf_tokenizer(folder).begin_ids if (Path(folder) / "tokenizer.json").is_file() else []
    if model.tokenizer("a")["input_ids"][: len(begin)] != begin:
        model.tokenizer.add_bos_token = True  # transformers 5 reads over this key of the folder; training does not
    lengths = None if max_seq_lengths is None else [int(length) for length in max_seq_lengths]
    # lm-eval counts a limit over all lengths of a task: with several, it would run the first alone.
    runs = [lengths] if limit is None or not lengths else [[length] for length in lengths]
    scores: dict[str, dict[str, float]] = {}
    answers: dict[str, list[float]] = {}
    for run in runs:
        metadata: dict[str, Any] = {"pretrained": str(folder)}  # RULER sizes its texts with the model's tokenizer
        if run is not None:
            metadata["max_seq_lengths"] = run
        with (
            exports_compute(torch.device(device), model.model),
            local_code_eval(allow_code_execution),
            tempfile.TemporaryDirectory() as written,
        ):
            changed = {task: local_files_task(task, splits, written) for task, splits in (files or {}).items()}
            results = lm_eval.simple_evaluate(
                model=model,
                tasks=[local_task() if task == LOCAL_TASK else changed.get(task, task) for task in tasks],
                limit=limit,
                num_fewshot=num_fewshot,
                bootstrap_iters=0,
                log_samples=True,
                confirm_run_unsafe_code=allow_code_execution,
                random_seed=seed,
                numpy_random_seed=seed,
                torch_random_seed=seed,
                fewshot_random_seed=seed,
                metadata=metadata,
            )
        for task, row in _scores(results["results"]).items():
            scores.setdefault(task, {}).update(row)
        for task, examples in results["samples"].items():
            if results["configs"][task]["output_type"] == "generate_until":
                answers.setdefault(task, []).extend(_by_example(examples))
    return LmEvalResult(scores, answers)


def _by_example(samples: Sequence[Mapping[str, Any]]) -> list[float]:
    """The first metric of each example after the first filter, which are the same for every model."""
    first = [sample for sample in samples if sample["filter"] == samples[0]["filter"]]
    found = []
    for sample in sorted(first, key=lambda sample: sample["doc_id"]):
        values = (sample[metric] for metric in sample["metrics"] if isinstance(sample[metric], (int, float)))
        found.append(next((float(value) for value in values if value >= 0), 0.0))  # RULER: -1 at other lengths
    return found


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
