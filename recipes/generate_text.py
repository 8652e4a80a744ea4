"""Text that the teacher writes, to train a student on where there is no corpus, or too little of the right kind.

    tune run recipes/generate_text --config configs/generate_text.yaml

Writes ``text.jsonl`` to ``output_dir``, which is then a source as any other (``packed_text``, or one of the ``sources`` of
``mixed_text``), and ``report.json``. The same command goes on with an interrupted run, or adds documents to a finished one:
document i is the same in both. One process.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from omegaconf import DictConfig
from tqdm import tqdm

from tcal_components.checkpoint.fingerprint import fingerprint, folder_fingerprint
from tcal_components.checkpoint.folder_lock import lock_folder
from tcal_components.config import (
    ConfigError,
    Count,
    Length,
    Positive,
    Range,
    RunConfig,
    Settings,
    Share,
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
from tcal_components.data import PackedTextDataset
from tcal_components.data.generated import GeneratedText
from tcal_components.distributed import setup_process_group
from tcal_components.distributed.preemption import one_line_ending
from tcal_components.evaluation.generation import choose_prompts
from tcal_components.evaluation.load import ModelSource, load_model
from tcal_components.modules.generation import generate
from tcal_components.modules.sampling import Sampling
from tcal_components.ops.kernels import tune_kernels
from tcal_components.precision.dtypes import parse_dtype
from tcal_components.reporting import Report


@dataclass(frozen=True)
class GenerateTextConfig(Settings):
    """Section ``generate_text``.

    Attributes:
        documents: How many.
        prompt_tokens: Of each beginning that is taken from ``prompt_dataset``; of a document that is too short its half.
        new_tokens: Most that are added; a document ends earlier where the teacher ends it.
        temperature: Of the sampling.
        top_p: Only the most likely tokens that together reach this probability; slow below 1.
        min_p: Only tokens of at least this share of the most likely one's probability. At 0 a long text derails sooner or
            later, for every wrong token is drawn once.
        batch_size: Documents written at once, and kept on disk together.
        keep_prompts: The beginning stays in the text.
    """

    documents: Annotated[int, Range(1, 10**9)] = 1024
    prompt_tokens: Length = 32
    new_tokens: Annotated[int, Range(1, 2**20)] = 480
    temperature: Positive = 1.0
    top_p: Annotated[float, Range(above=0, most=1)] = 1.0
    min_p: Share = 0.05
    batch_size: Count = 256
    keep_prompts: bool = True


@dataclass(frozen=True)
class _Keys(RunConfig):
    """Top-level keys that hold a single value."""


@dataclass
class Run:
    """What the config asks for, checked."""

    settings: GenerateTextConfig
    sampling: Sampling
    source: ModelSource
    device: torch.device
    dtype: torch.dtype
    seed: int
    tokenizer: Any
    prompts: list[list[int]]
    text: GeneratedText
    lock: Any
    data: dict[str, Any] = field(default_factory=dict)


def check_config(cfg: DictConfig) -> Run:
    """Reads the whole config before any weight is loaded; every mistake is one line."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("generate_text runs as one process; start it without --nproc_per_node")
    read_torchtune_texts(cfg, ("prompt_dataset",))
    check_top_level(cfg, [*keys_of(_Keys), "generate_text", "teacher", "tokenizer", "prompt_dataset"])
    run = read(_Keys, cfg)
    resolve_assets(cfg)
    device, dtype = setup_process_group(run.device), parse_dtype(run.dtype, "dtype")
    tune_kernels(run.tune_kernels)
    settings = section(GenerateTextConfig, cfg.get("generate_text"), "generate_text")
    sampling = Sampling(settings.temperature, settings.top_p, settings.min_p)
    if cfg.get("teacher") is None:
        raise ConfigError("the key teacher is missing: the model that writes")
    source = section(ModelSource, cfg.teacher, "teacher")
    source.check("teacher")
    if source.checkpoint_dir is None:
        raise ConfigError("teacher: give checkpoint_dir; our decoder is what writes many texts at once")
    check_component(cfg.get("tokenizer"), "tokenizer")
    tokenizer = build(cfg.tokenizer, "tokenizer")
    # Without prompts it begins as its documents begin: behind a begin token, or behind the end of another document.
    prompts, data = [tokenizer.begin_ids or [tokenizer.eos_id]], {}
    # On the command line torchtune 0.6.1 makes prompt_dataset._component_ of prompt_dataset.
    if cfg.get("prompt_dataset") is not None and cfg.prompt_dataset.get("_component_", "") is not None:
        check_component(cfg.prompt_dataset, "prompt_dataset", supplied=("tokenizer",))
        dataset = build(cfg.prompt_dataset, "prompt_dataset", tokenizer, makes=PackedTextDataset)
        prompts = choose_prompts(dataset, count=len(dataset.documents), tokens=settings.prompt_tokens)
        if not prompts:
            raise ConfigError("prompt_dataset has no document of two tokens to continue")
        sources = dict(dataset.sources)
        data = {"prompts": {"source": sources.pop("path", None), **sources}}
    folder = Path(run.output_dir)
    check_output_dir(folder, inputs=[Path(source.checkpoint_dir)])
    lock = lock_folder(folder)
    # All that decides what document i is; how many there are and how many at once does not.
    deciding = {name: value for name, value in asdict(settings).items() if name not in ("documents", "batch_size")}
    inputs = {
        "teacher.checkpoint_dir": folder_fingerprint(source.checkpoint_dir),
        "teacher.weights": source.weights and folder_fingerprint(source.weights),
        "generate_text": deciding,
        "prompts": fingerprint(prompts),
        "seed": run.seed,
        "dtype": str(dtype),
    }
    return Run(
        settings=settings,
        sampling=sampling,
        source=source,
        device=device,
        dtype=dtype,
        seed=run.seed,
        tokenizer=tokenizer,
        prompts=prompts,
        text=GeneratedText(folder, inputs),
        lock=lock,
        data=data,
    )


@command_line
def recipe_main(cfg: DictConfig) -> None:
    """Entry point of ``tune run``."""
    with one_line_errors():
        run = check_config(cfg)
    with one_line_ending():
        write_text(cfg, run)


def write_text(cfg: DictConfig, run: Run) -> None:
    """Documents, batch by batch, and the report."""
    settings, text, tokenizer = run.settings, run.text, run.tokenizer
    report = Report(cfg.output_dir, "generate_text", cfg, device=run.device)
    report.update({"data": run.data})
    longest = max(map(len, run.prompts)) + settings.new_tokens
    stop = {tokenizer.eos_id, *getattr(tokenizer, "stop_tokens", ())}
    with report.stage("generate_text") as clock:
        with one_line_errors():
            model = load_model(run.source, device=run.device, dtype=run.dtype, min_seq_len=longest)
        before = text.tokens
        with tqdm(total=settings.documents, initial=text.documents, desc="generate_text", unit="document") as bar:
            while text.documents < settings.documents:
                # Document i has prompt i, over and over, and a generator of its own: the same however often this stops.
                first = text.documents
                batch = range(first, min(first + settings.batch_size, settings.documents))
                prompts = [run.prompts[index % len(run.prompts)] for index in batch]
                made = generate(
                    model,  # type: ignore[arg-type]
                    prompts,
                    max_new_tokens=settings.new_tokens,
                    sampling=run.sampling,
                    stop_tokens=sorted(stop),
                    seed=run.seed * 2**32 + first,
                    batch_size=settings.batch_size,
                )
                rows = []
                for prompt, ids in zip(prompts, made):
                    kept = [*prompt, *ids] if settings.keep_prompts else ids
                    rows.append({"text": tokenizer.decode(kept), "tokens": len(ids)})
                text.append(rows)
                bar.update(len(batch))
        clock.add_tokens(text.tokens - before)
        clock.record({"tokens": {"generated": text.tokens}})
        clock.record({"generated_text": {"path": str(text.path), "documents": text.documents, "tokens": text.tokens}})
    print(f"text: {text.path}, {text.documents} documents, {text.tokens} tokens")
    report.finish()


if __name__ == "__main__":
    sys.exit(recipe_main())
