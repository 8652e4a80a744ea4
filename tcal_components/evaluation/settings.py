"""Config sections of the recipe ``evaluate_hybrid``, one a measurement."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from tcal_components.config import ConfigError, Count, Length, OneOf, Range, Settings
from tcal_components.evaluation.generation import GenerationConfig
from tcal_components.evaluation.harness import LOCAL_TASK
from tcal_components.evaluation.recall.tasks import TASKS
from tcal_components.evaluation.speed import WARMUP_STEPS

MEASUREMENTS = ("perplexity", "retrieval", "agreement", "generation", "speed", "lm_eval")
# Tokens of all examples of the retrieval, which are made before any model is read and stay in memory.
_MOST_EXAMPLE_TOKENS = 2**24


@dataclass(frozen=True)
class PerplexitySettings(Settings):
    """Perplexity, by position, and of the same tokens after contexts of growing length."""

    batch_size: Count = 4
    max_sequences: Annotated[int, Range(1, 10**9)] | None = None
    context_lengths: list[Length] = field(default_factory=list)
    scored: Annotated[int, Range(1, 2**22)] = 128  # tokens predicted at the end of each sequence, after every length


@dataclass(frozen=True)
class RetrievalSettings(Settings):
    """Retrieval by distance."""

    tasks: Annotated[list[Annotated[str, OneOf(TASKS)]], Range(1, 100)] = field(default_factory=lambda: list(TASKS))
    distances: Annotated[list[Length], Range(1, 100)] = field(default_factory=lambda: [512, 1024, 2048])
    examples: Count = 32
    batch_size: Count = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_examples(self.tasks, self.distances, self.examples)


def _check_examples(tasks: list[str], distances: list[int], examples: int) -> None:
    tokens = len(tasks) * examples * sum(distances)
    if tokens > _MOST_EXAMPLE_TOKENS:
        raise ConfigError(
            f"examples is {examples}, which with these tasks and distances makes {tokens} tokens of text, "
            f"expected at most {_MOST_EXAMPLE_TOKENS}"
        )


@dataclass(frozen=True)
class AgreementSettings(Settings):
    """Hidden states by layer, top token and KL against the teacher."""

    batch_size: Count = 2
    max_sequences: Annotated[int, Range(1, 10**9)] = 32


@dataclass(frozen=True)
class GenerationSettings(GenerationConfig):
    """Continuations of the evaluation text, and retrieval whose answers are generated; ``tasks: []`` leaves these out."""

    tasks: list[Annotated[str, OneOf(TASKS)]] = field(default_factory=lambda: ["extraction", "needle", "copy"])
    distances: Annotated[list[Length], Range(1, 100)] = field(default_factory=lambda: [512])
    examples: Count = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_examples(self.tasks, self.distances, self.examples)


@dataclass(frozen=True)
class SpeedSettings(Settings):
    """Prefill, decoding and cache by context length."""

    contexts: Annotated[list[Length], Range(1, 100)] = field(default_factory=lambda: [1024, 4096, 16384])
    batch_size: Count = 1
    decode_tokens: Annotated[int, Range(WARMUP_STEPS + 1, 2**22)] = 32  # the first of them only warm up
    repeats: Count = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.contexts) <= self.decode_tokens:
            raise ConfigError(f"decode_tokens is {self.decode_tokens}, expected less than every context")


@dataclass(frozen=True)
class LmEvalSettings(Settings):
    """Tasks of lm-eval; only for models that transformers loads.

    Attributes:
        files: By task, the local file of each split (.jsonl, .jsonl.gz, .parquet), where a task would download them.
        allow_code_execution: Run the programs that a model writes; humaneval and mbpp need it.
    """

    tasks: Annotated[list[str], Range(1)] = field(default_factory=lambda: [LOCAL_TASK])
    batch_size: Count = 8
    limit: Annotated[int, Range(1, 10**9)] | None = None
    num_fewshot: Annotated[int, Range(0, 1000)] | None = None
    max_seq_lengths: list[Length] | None = None
    files: dict[str, dict[str, str]] = field(default_factory=dict)
    allow_code_execution: bool = False
    trust_remote_code: bool = False


SECTIONS = {
    "perplexity": PerplexitySettings,
    "retrieval": RetrievalSettings,
    "agreement": AgreementSettings,
    "generation": GenerationSettings,
    "speed": SpeedSettings,
    "lm_eval": LmEvalSettings,
}
