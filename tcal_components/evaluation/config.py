"""The config of an evaluation: what is measured, of which models, on which text; every mistake is one line."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from omegaconf import DictConfig, OmegaConf

from tcal_components.config import (
    ConfigError,
    OneOf,
    Range,
    RunConfig,
    build,
    check_component,
    check_output_dir,
    check_top_level,
    keys_of,
    read,
    resolve_assets,
    section,
)
from tcal_components.config.torchtune_components import read_torchtune_texts
from tcal_components.distributed import setup_process_group
from tcal_components.evaluation.generation import (
    Continuations,
    ContinuationScores,
    choose_prompts,
)
from tcal_components.evaluation.harness import check_tasks
from tcal_components.evaluation.load import ModelSource
from tcal_components.evaluation.perplexity import (
    check_context_lengths,
)
from tcal_components.evaluation.recall.predicted import example_sets
from tcal_components.evaluation.recall.tasks import Example
from tcal_components.evaluation.settings import MEASUREMENTS, SECTIONS
from tcal_components.models.hf_config import read_config
from tcal_components.ops.kernels import tune_kernels
from tcal_components.precision.dtypes import parse_dtype


@dataclass(frozen=True)
class EvaluateConfig(RunConfig):
    """Top-level keys of this recipe: what is measured, and by name the students, null for one that is left out."""

    evaluate: Annotated[list[Annotated[str, OneOf(MEASUREMENTS)]], Range(1)] = field(kw_only=True)
    students: dict[str, Any] = field(default_factory=dict)


_KEYS = [*keys_of(EvaluateConfig), *SECTIONS, "tokenizer", "validation_dataset", "teacher"]


@dataclass
class Run:
    """What the config asks for, checked; and what was found so far, where one model is compared with others."""

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
        component: Any = OmegaConf.to_container(node, resolve=True)
        source = ModelSource(component=component)
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
    settings: dict[str, Any] = {name: section(kind, cfg.get(name), name) for name, kind in SECTIONS.items()}
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
        ready = [name for name, source in sources.items() if transformers_folder(source)]
        if not ready:
            raise ConfigError("lm_eval needs a folder that transformers loads: give a student as `folder: EXPORT`")
    tokenizer: Any = None
    dataset: Any = None
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


def transformers_folder(source: ModelSource) -> str | None:
    """The folder that lm-eval can load: an export, or the checkpoint of a teacher."""
    return source.folder or (source.checkpoint_dir if source.weights is None else None)
