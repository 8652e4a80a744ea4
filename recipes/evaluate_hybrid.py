"""Teacher and students side by side: perplexity, retrieval by distance, agreement, speed and cache, lm-eval.

    tune run recipes/evaluate_hybrid --config configs/evaluate.yaml

Writes ``report.json``, ``report.md`` and plots to ``output_dir``. One process; models are loaded one after the other, only
the teacher stays in memory while agreement is measured.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torchtune import config, training

from tcal_components.config import (
    ConfigError,
    build,
    check_component,
    check_keys,
    device_name,
    one_line_errors,
    resolve_assets,
    scalar,
    section,
)
from tcal_components.distributed import setup_process_group
from tcal_components.evaluation.agreement import agreement
from tcal_components.evaluation.harness import check_tasks, lm_eval_scores
from tcal_components.evaluation.load import ModelSource, exports_compute, free, load_model
from tcal_components.evaluation.perplexity import (
    check_context_lengths,
    evaluation_batches,
    perplexity,
    perplexity_by_context,
)
from tcal_components.evaluation.retrieval import example_sets, retrieval
from tcal_components.evaluation.settings import MEASUREMENTS, SECTIONS
from tcal_components.evaluation.speed import speed
from tcal_components.ops.kernels import tune_kernels
from tcal_components.precision.dtypes import parse_dtype
from tcal_components.reporting import Report

_KEYS = [
    *("output_dir", "seed", "device", "dtype", "evaluate", "tokenizer", "validation_dataset", "teacher", "students"),
    "tune_kernels",
]


@dataclass
class Run:
    """What the config asks for, checked."""

    measurements: list[str]
    settings: dict[str, Any]
    sources: dict[str, ModelSource]  # the teacher first
    device: torch.device
    dtype: torch.dtype
    seed: int
    tokenizer: Any
    dataset: Any
    longest: int  # tokens of the longest sequence that any measurement needs


def _source(node: Any, where: str, *, trusted: bool) -> ModelSource:
    if isinstance(node, DictConfig) and "_component_" in node:
        check_component(node, where)
        source = ModelSource(component=OmegaConf.to_container(node, resolve=True))
    else:
        source = section(ModelSource, node, where)
    source.trust_remote_code |= trusted
    source.check(where)
    return source


def _check_lengths(sources: dict[str, ModelSource], longest: int) -> None:
    """Our decoders are built for a longest sequence, and a builder is called with one."""
    for name, source in sources.items():
        where, able = name if name == "teacher" else f"students.{name}", source.max_seq_len
        if source.component is not None:
            with torch.device("meta"):
                able = getattr(build(OmegaConf.create(source.component), where), "max_seq_len", None)
        if able is not None and source.folder is None and able < longest:
            raise ConfigError(f"{where}.max_seq_len is {able}, expected at least {longest}, what evaluate measures")


def check_config(cfg: DictConfig) -> Run:
    """Reads the whole config before any weight is loaded; every mistake is one line."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("evaluate_hybrid runs as one process; start it without --nproc_per_node")
    check_keys(cfg, [*_KEYS, *SECTIONS], "the config")
    if not scalar(cfg, "output_dir", str, ""):
        raise ConfigError("the config has no output_dir")
    resolve_assets(cfg)
    device, seed = setup_process_group(device_name(cfg)), scalar(cfg, "seed", int, 0, least=0)
    tune_kernels(scalar(cfg, "tune_kernels", bool, False))
    measurements = list(cfg.get("evaluate", []))
    for name in measurements:
        if name not in MEASUREMENTS:
            raise ConfigError(f"unknown measurement '{name}' in evaluate; allowed: {', '.join(MEASUREMENTS)}")
    if not measurements:
        raise ConfigError(f"evaluate is empty; allowed: {', '.join(MEASUREMENTS)}")
    settings = {name: section(kind, cfg.get(name), name) for name, kind in SECTIONS.items()}
    if cfg.get("teacher") is None:
        raise ConfigError("the key teacher is missing: what the students are compared with")
    trusted = "lm_eval" in measurements and settings["lm_eval"].trust_remote_code  # it loads the same folders
    sources = {"teacher": _source(cfg.teacher, "teacher", trusted=trusted)}
    for name, node in (cfg.get("students") or {}).items():
        if name in sources:
            raise ConfigError(f"students.{name}: this name is taken")
        if node is None:  # left out on the command line: students.NAME=null
            continue
        sources[name] = _source(node, f"students.{name}", trusted=trusted)
    text_needed = [name for name in measurements if name in ("perplexity", "retrieval", "agreement")]
    random = [name for name, source in sources.items() if source.component is not None]
    if text_needed and random:
        raise ConfigError(f"{random[0]} has random weights, for which only speed says anything; evaluate: [speed]")
    if "lm_eval" in measurements:
        check_tasks(settings["lm_eval"].tasks)
        ready = [name for name, source in sources.items() if _transformers_folder(source)]
        if not ready:
            raise ConfigError("lm_eval needs a folder that transformers loads: give a student as `folder: EXPORT`")
    tokenizer = dataset = None
    if text_needed:
        check_component(cfg.get("tokenizer"), "tokenizer")
        tokenizer = build(cfg.tokenizer, "tokenizer")
    if "perplexity" in measurements or "agreement" in measurements:
        check_component(cfg.get("validation_dataset"), "validation_dataset", supplied=("tokenizer",))
        dataset = build(cfg.validation_dataset, "validation_dataset", tokenizer)
    longest = 0 if dataset is None else dataset.seq_len
    if "perplexity" in measurements:
        options = settings["perplexity"]
        try:
            check_context_lengths(options.context_lengths, scored=options.scored, seq_len=dataset.seq_len)
        except ValueError as error:
            raise ConfigError(f"perplexity.context_lengths: {error}") from error
    if "retrieval" in measurements:
        options = settings["retrieval"]
        numbers = {"tasks": options.tasks, "distances": options.distances, "examples": options.examples}
        try:
            questions = example_sets(tokenizer, seed=seed, **numbers)
        except ValueError as error:
            raise ConfigError(f"retrieval.distances: {error}") from error
        longest = max(longest, *(len(example.tokens) for examples in questions.values() for example in examples))
    if "speed" in measurements:
        longest = max(longest, *settings["speed"].contexts)
    _check_lengths(sources, longest)
    return Run(
        measurements=measurements,
        settings=settings,
        sources=sources,
        device=device,
        dtype=parse_dtype(scalar(cfg, "dtype", str, "fp32"), "dtype"),
        seed=seed,
        tokenizer=tokenizer,
        dataset=dataset,
        longest=longest,
    )


def _transformers_folder(source: ModelSource) -> str | None:
    """The folder that lm-eval can load: an export, or the checkpoint of a teacher."""
    return source.folder or (source.checkpoint_dir if source.weights is None else None)


def _record(report: Report, section_name: str, model: str, value: Any) -> None:
    report.update({"evaluation": {section_name: {model: value}}})


def _record_rows(report: Report, section_name: str, model: str, rows: list[Any]) -> None:
    known = report["evaluation"].get(section_name, [])
    report.update({"evaluation": {section_name: [*known, *({"model": model, **row.as_dict()} for row in rows)]}})


def evaluate_model(run: Run, report: Report, name: str, model: nn.Module, teacher: nn.Module | None) -> None:
    """Every measurement that needs the model in memory."""
    settings = run.settings
    if "perplexity" in run.measurements:
        options = settings["perplexity"]
        common = {"batch_size": options.batch_size, "max_sequences": options.max_sequences, "device": run.device}
        result = perplexity(model, run.dataset, **common, progress=f"{name}: perplexity")
        _record(report, "perplexity", name, result.as_dict())
        if name == "teacher":
            report.update({"teacher": {"perplexity": result.perplexity}})
        if options.context_lengths:
            by_length = perplexity_by_context(
                model,
                run.dataset,
                lengths=options.context_lengths,
                scored=options.scored,
                **common,
                progress=f"{name}: perplexity",
            )
            _record(report, "perplexity_by_context", name, by_length)
    if "retrieval" in run.measurements:
        options = settings["retrieval"]
        rows = retrieval(
            model,
            run.tokenizer,
            tasks=options.tasks,
            distances=options.distances,
            examples=options.examples,
            batch_size=options.batch_size,
            seed=run.seed,
            device=run.device,
            progress=f"{name}: retrieval",
        )
        _record_rows(report, "retrieval", name, rows)
    if "agreement" in run.measurements and teacher is not None and name != "teacher":
        options = settings["agreement"]
        batches = evaluation_batches(run.dataset, batch_size=options.batch_size, max_sequences=options.max_sequences)
        agreed = agreement(teacher, model, batches, device=run.device, progress=f"{name}: agreement")
        _record(report, "agreement", name, agreed.as_dict())
    if "speed" in run.measurements:
        options = settings["speed"]
        rows = speed(
            model,
            contexts=options.contexts,
            batch_size=options.batch_size,
            decode_tokens=options.decode_tokens,
            repeats=options.repeats,
            progress=f"{name}: speed",
        )
        _record_rows(report, "speed", name, rows)


def describe(report: Report, name: str, source: ModelSource, model: nn.Module) -> None:
    """What the model is, for the report's tables."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    _record(report, "models", name, {"source": source.describe(), "parameters": parameters})
    if name == "teacher":
        family = model.config.model_type if source.folder else model.spec.family
        report.update({"teacher": {"family": family, "parameters": parameters}})
    elif report["student"]["parameters"] is None:  # the contract has room for one student: the first
        report.update({"student": {"parameters": parameters}})
        if not source.folder:
            layers = {"retained_layers": model.retained_layers, "converted_layers": model.converted_layers}
            report.update({"student": layers})


@config.parse
def recipe_main(cfg: DictConfig) -> None:
    """Entry point of ``tune run``."""
    with one_line_errors():
        run = check_config(cfg)
    training.set_seed(run.seed)
    report = Report(cfg.output_dir, "evaluate_hybrid", cfg, device=run.device)
    report.update({"evaluation": {"models": {}}})
    if run.dataset is not None:
        sources = dict(run.dataset.sources)
        report.update({"data": {"evaluation": {"source": sources.pop("path", None), **sources}}})

    teacher = None
    in_memory = any(name != "lm_eval" for name in run.measurements)
    for name, source in run.sources.items():
        with report.stage(f"evaluate {name}"):
            if in_memory:
                with one_line_errors():
                    model = load_model(source, device=run.device, dtype=run.dtype, min_seq_len=run.longest)
                describe(report, name, source, model)
                with exports_compute(run.device, model, teacher):
                    evaluate_model(run, report, name, model, teacher)
                if name == "teacher" and "agreement" in run.measurements:
                    teacher = model
                del model
                free(run.device)
            folder = _transformers_folder(source)
            if "lm_eval" in run.measurements and folder is not None:
                options = run.settings["lm_eval"]
                scores = lm_eval_scores(
                    folder,
                    tasks=options.tasks,
                    dtype=str(run.dtype).removeprefix("torch."),
                    device=str(run.device),
                    batch_size=options.batch_size,
                    limit=options.limit,
                    num_fewshot=options.num_fewshot,
                    max_seq_lengths=options.max_seq_lengths,
                    trust_remote_code=source.trust_remote_code,
                    seed=run.seed,
                )
                _record(report, "lm_eval", name, scores)
    print(f"report: {report.finish()}")


if __name__ == "__main__":
    sys.exit(recipe_main())
