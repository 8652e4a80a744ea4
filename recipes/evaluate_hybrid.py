"""Teacher and students side by side: perplexity, retrieval by distance, agreement, what they write, speed and cache, lm-eval.

    tune run recipes/evaluate_hybrid --config configs/evaluate.yaml

Writes ``report.json``, ``report.md`` and plots to ``output_dir``. One process; models are loaded one after the other, only
the teacher stays in memory where agreement or generated text is measured.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torchtune import training

from tcal_components.checkpoint.folder_lock import lock_folder
from tcal_components.config import (
    ConfigError,
    OneOf,
    Range,
    RunConfig,
    build,
    check_component,
    check_output_dir,
    check_top_level,
    command_line,
    keys_of,
    one_line_errors,
    read,
    resolve_assets,
    section,
)
from tcal_components.config.torchtune_components import read_torchtune_texts
from tcal_components.distributed import setup_process_group
from tcal_components.distributed.preemption import one_line_ending
from tcal_components.evaluation.agreement import agreement
from tcal_components.evaluation.generation import (
    Continuations,
    ContinuationScores,
    choose_prompts,
    continuation_report,
    continuations,
    score_continuations,
    text_samples,
)
from tcal_components.evaluation.harness import check_tasks, lm_eval_results
from tcal_components.evaluation.load import ModelSource, exports_compute, free, load_model
from tcal_components.evaluation.perplexity import (
    check_context_lengths,
    evaluation_batches,
    perplexity,
    perplexity_by_context,
)
from tcal_components.evaluation.recall.answers import answer_report, answers, task_rows
from tcal_components.evaluation.recall.predicted import example_sets, retrieval
from tcal_components.evaluation.recall.tasks import Example
from tcal_components.evaluation.settings import MEASUREMENTS, SECTIONS
from tcal_components.evaluation.speed import speed
from tcal_components.models.hf_config import read_config
from tcal_components.ops.kernels import tune_kernels
from tcal_components.precision.dtypes import parse_dtype
from tcal_components.reporting import Report


@dataclass(frozen=True)
class EvaluateConfig(RunConfig):
    """Top-level keys of this recipe: what is measured, and by name the students, null for one that is left out."""

    evaluate: Annotated[list[Annotated[str, OneOf(MEASUREMENTS)]], Range(1)] = field(kw_only=True)
    students: dict[str, Any] = field(default_factory=dict)


_KEYS = [*keys_of(EvaluateConfig), *SECTIONS, "tokenizer", "validation_dataset", "teacher"]


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
    prompts: list[list[int]]  # to continue, and questions to answer by task and distance
    questions: dict[tuple[str, int], list[Example]]
    written: dict[str, Continuations] = field(default_factory=dict)  # so far, by model
    scores: dict[str, ContinuationScores] = field(default_factory=dict)
    right: dict[str, dict[tuple[str, int], list[bool]]] = field(default_factory=dict)
    by_harness: dict[str, dict[str, list[float]]] = field(default_factory=dict)


def _source(node: Any, where: str, *, trusted: bool) -> ModelSource:
    if isinstance(node, DictConfig) and "_component_" in node:
        check_component(node, where)
        source = ModelSource(component=OmegaConf.to_container(node, resolve=True))
    else:
        source = section(ModelSource, node, where)
    source = replace(source, trust_remote_code=source.trust_remote_code or trusted)
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


def _check_vocabulary(sources: dict[str, ModelSource], tokenizer: Any) -> None:
    """A token without a row in the embedding would end the run, on a GPU without a word about the reason."""
    for name, source in sources.items():
        folder = source.folder or source.checkpoint_dir
        rows = read_config(folder).get("vocab_size") if folder is not None else None
        if isinstance(rows, int) and tokenizer.vocab_size > rows:
            raise ConfigError(
                f"the tokenizer uses token ids up to {tokenizer.vocab_size - 1}, the embedding of {name} in {folder} has "
                f"rows for the ids 0 to {rows - 1}"
            )


def check_config(cfg: DictConfig) -> Run:
    """Reads the whole config before any weight is loaded; every mistake is one line."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("evaluate_hybrid runs as one process; start it without --nproc_per_node")
    read_torchtune_texts(cfg, ("validation_dataset",))
    # Two names that our configs refer to; the command line may have replaced all that does.
    check_top_level(cfg, [*_KEYS, "run_dir", "teacher_dir"])
    run = read(EvaluateConfig, cfg)
    resolve_assets(cfg)
    device, seed, measurements = setup_process_group(run.device), run.seed, run.evaluate
    tune_kernels(run.tune_kernels)
    settings = {name: section(kind, cfg.get(name), name) for name, kind in SECTIONS.items()}
    if cfg.get("teacher") is None:
        raise ConfigError("the key teacher is missing: what the students are compared with")
    trusted = "lm_eval" in measurements and settings["lm_eval"].trust_remote_code  # it loads the same folders
    sources = {"teacher": _source(cfg.teacher, "teacher", trusted=trusted)}
    for name in run.students:
        node = cfg.students[name]
        if name in sources:
            raise ConfigError(f"students.{name}: this name is taken")
        if node is None:  # left out on the command line: students.NAME=null
            continue
        sources[name] = _source(node, f"students.{name}", trusted=trusted)
    text_needed = [name for name in measurements if name not in ("speed", "lm_eval")]
    random = [name for name, source in sources.items() if source.component is not None]
    if text_needed and random:
        raise ConfigError(f"{random[0]} has random weights, for which only speed says anything; evaluate: [speed]")
    if "lm_eval" in measurements:
        options = settings["lm_eval"]
        check_tasks(options.tasks, options.files, allow_code_execution=options.allow_code_execution)
        ready = [name for name, source in sources.items() if _transformers_folder(source)]
        if not ready:
            raise ConfigError("lm_eval needs a folder that transformers loads: give a student as `folder: EXPORT`")
    tokenizer = dataset = None
    if text_needed:
        check_component(cfg.get("tokenizer"), "tokenizer")
        tokenizer = build(cfg.tokenizer, "tokenizer")
        _check_vocabulary(sources, tokenizer)
    if {"perplexity", "agreement", "generation"} & set(measurements):
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
        longest = max(longest, _longest(_questions("retrieval", options, sources, tokenizer, seed)))
    prompts, questions = [], {}
    if "generation" in measurements:
        options = settings["generation"]
        prompts = choose_prompts(dataset, count=options.prompts, tokens=options.prompt_tokens)
        if not prompts:
            raise ConfigError("generation: validation_dataset has no document of two tokens to continue")
        questions = _questions("generation", options, sources, tokenizer, seed)
        longest = max(longest, options.length, _longest(questions))
    if "speed" in measurements:
        longest = max(longest, *settings["speed"].contexts)
    _check_lengths(sources, longest)
    folders = [
        Path(source.folder or source.checkpoint_dir or "") for source in sources.values() if not source.component
    ]
    check_output_dir(Path(run.output_dir), inputs=folders)
    return Run(
        measurements=measurements,
        settings=settings,
        sources=sources,
        device=device,
        dtype=parse_dtype(run.dtype, "dtype"),
        seed=seed,
        tokenizer=tokenizer,
        dataset=dataset,
        longest=longest,
        prompts=prompts,
        questions=questions,
    )


def _questions(
    where: str, options: Any, sources: dict[str, ModelSource], tokenizer: Any, seed: int
) -> dict[tuple[str, int], list[Example]]:
    """Retrieval examples of a section, by task and distance."""
    _check_lengths(sources, max(options.distances) if options.tasks else 0)
    numbers = {"tasks": options.tasks, "distances": options.distances, "examples": options.examples}
    try:
        return example_sets(tokenizer, seed=seed, **numbers)
    except ValueError as error:
        raise ConfigError(f"{where}.distances: {error}") from error


def _longest(questions: dict[tuple[str, int], list[Example]]) -> int:
    return max((len(example.tokens) for examples in questions.values() for example in examples), default=0)


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
    if "generation" in run.measurements:
        _evaluate_generation(run, report, name, model, teacher or model)
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


def _evaluate_generation(run: Run, report: Report, name: str, model: nn.Module, teacher: nn.Module) -> None:
    """What a model writes: continuations in the teacher's eyes, and answers; the teacher comes first."""
    options, label = run.settings["generation"], f"{name}: generation"
    own = run.written[name] = continuations(model, run.prompts, options, seed=run.seed, progress=label)
    run.scores[name] = score_continuations(teacher, run.prompts, run.written["teacher"], own)
    report.update(continuation_report(options, run.prompts, run.scores))
    report.update(text_samples(run.tokenizer, run.prompts, run.written))
    if run.questions:
        size = options.batch_size
        run.right[name] = {
            key: answers(model, examples, batch_size=size, progress=label) for key, examples in run.questions.items()
        }
        report.update(answer_report(run.right))


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


@command_line
def recipe_main(cfg: DictConfig) -> None:
    """Entry point of ``tune run``."""
    with one_line_errors():
        run = check_config(cfg)
        _lock = lock_folder(cfg.output_dir)
    with one_line_ending():
        evaluate(cfg, run)


def evaluate(cfg: DictConfig, run: Run) -> None:
    """Measures every model of the config and writes the report."""
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
                if name == "teacher" and {"agreement", "generation"} & set(run.measurements):
                    teacher = model
                del model
                free(run.device)
            folder = _transformers_folder(source)
            if "lm_eval" in run.measurements and folder is not None:
                options = run.settings["lm_eval"]
                found = lm_eval_results(
                    folder,
                    tasks=options.tasks,
                    dtype=str(run.dtype).removeprefix("torch."),
                    device=str(run.device),
                    batch_size=options.batch_size,
                    limit=options.limit,
                    num_fewshot=options.num_fewshot,
                    max_seq_lengths=options.max_seq_lengths,
                    files=options.files,
                    allow_code_execution=options.allow_code_execution,
                    trust_remote_code=source.trust_remote_code,
                    seed=run.seed,
                )
                _record(report, "lm_eval", name, found.scores)
                run.by_harness[name] = found.answers
                report.update({"generation": task_rows(run.by_harness)})
    print(f"report: {report.finish()}")


if __name__ == "__main__":
    sys.exit(recipe_main())
