"""Teacher and students side by side: perplexity, retrieval by distance, agreement, what they write, speed and cache, lm-eval.

    tune run recipes/evaluate_hybrid --config configs/evaluate.yaml

Writes ``report.json``, ``report.md`` and plots to ``output_dir``. One process; models are loaded one after the other, only
the teacher stays in memory where agreement or generated text is measured.
"""

from __future__ import annotations

import sys
from typing import Any

from omegaconf import DictConfig
from torch import nn
from torchtune import training

from tcal_components.checkpoint.folder_lock import lock_folder
from tcal_components.config import (
    command_line,
    one_line_errors,
)
from tcal_components.distributed.preemption import one_line_ending
from tcal_components.evaluation.agreement import agreement
from tcal_components.evaluation.config import Run, check_config, transformers_folder
from tcal_components.evaluation.generation import (
    continuation_report,
    continuations,
    score_continuations,
    text_samples,
)
from tcal_components.evaluation.harness import lm_eval_results
from tcal_components.evaluation.load import ModelSource, exports_compute, free, load_model
from tcal_components.evaluation.perplexity import (
    evaluation_batches,
    perplexity,
    perplexity_by_context,
)
from tcal_components.evaluation.recall.answers import answer_report, answers, task_rows
from tcal_components.evaluation.recall.predicted import retrieval
from tcal_components.evaluation.speed import speed
from tcal_components.reporting import Report


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
            folder = transformers_folder(source)
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
