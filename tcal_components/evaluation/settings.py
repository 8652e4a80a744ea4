"""Config sections of the recipe ``evaluate_hybrid``, one a measurement."""

from __future__ import annotations

from dataclasses import dataclass, field

from tcal_components.config import ConfigError
from tcal_components.evaluation.harness import LOCAL_TASK
from tcal_components.evaluation.retrieval_tasks import TASKS
from tcal_components.evaluation.speed import WARMUP_STEPS

MEASUREMENTS = ("perplexity", "retrieval", "agreement", "speed", "lm_eval")


def _positive(where: str, name: str, values: list[int]) -> None:
    if not values or any(isinstance(value, bool) or not isinstance(value, int) or value < 1 for value in values):
        raise ConfigError(f"{where}.{name} is {values}, expected whole numbers of at least 1")


@dataclass
class PerplexitySettings:
    """Perplexity, by position, and of the same tokens after contexts of growing length."""

    batch_size: int = 4
    max_sequences: int | None = None
    context_lengths: list[int] = field(default_factory=list)
    scored: int = 128  # tokens predicted at the end of each sequence, the same after every context length

    def __post_init__(self) -> None:
        _positive("perplexity", "batch_size", [self.batch_size])
        _positive("perplexity", "scored", [self.scored])
        if self.max_sequences is not None:
            _positive("perplexity", "max_sequences", [self.max_sequences])
        if self.context_lengths:
            _positive("perplexity", "context_lengths", self.context_lengths)


@dataclass
class RetrievalSettings:
    """Retrieval by distance."""

    tasks: list[str] = field(default_factory=lambda: list(TASKS))
    distances: list[int] = field(default_factory=lambda: [512, 1024, 2048])
    examples: int = 32
    batch_size: int = 4

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ConfigError(f"retrieval.tasks is empty; allowed: {', '.join(TASKS)}")
        for task in self.tasks:
            if task not in TASKS:
                raise ConfigError(f"unknown task '{task}' in retrieval.tasks; allowed: {', '.join(TASKS)}")
        _positive("retrieval", "distances", self.distances)
        _positive("retrieval", "examples", [self.examples])
        _positive("retrieval", "batch_size", [self.batch_size])


@dataclass
class AgreementSettings:
    """Hidden states by layer, top token and KL against the teacher."""

    batch_size: int = 2
    max_sequences: int = 32

    def __post_init__(self) -> None:
        _positive("agreement", "batch_size", [self.batch_size])
        _positive("agreement", "max_sequences", [self.max_sequences])


@dataclass
class SpeedSettings:
    """Prefill, decoding and cache by context length."""

    contexts: list[int] = field(default_factory=lambda: [1024, 4096, 16384])
    batch_size: int = 1
    decode_tokens: int = 32
    repeats: int = 3

    def __post_init__(self) -> None:
        _positive("speed", "contexts", self.contexts)
        _positive("speed", "batch_size", [self.batch_size])
        _positive("speed", "repeats", [self.repeats])
        if self.decode_tokens <= WARMUP_STEPS:
            raise ConfigError(
                f"speed.decode_tokens is {self.decode_tokens}, expected more than {WARMUP_STEPS}, which only warm up"
            )
        if min(self.contexts) <= self.decode_tokens:
            raise ConfigError(f"speed.decode_tokens is {self.decode_tokens}, expected less than every context")


@dataclass
class LmEvalSettings:
    """Tasks of lm-eval; only for models that transformers loads."""

    tasks: list[str] = field(default_factory=lambda: [LOCAL_TASK])
    batch_size: int = 8
    limit: int | None = None
    num_fewshot: int | None = None
    max_seq_lengths: list[int] | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ConfigError("lm_eval.tasks is empty")
        _positive("lm_eval", "batch_size", [self.batch_size])


SECTIONS = {
    "perplexity": PerplexitySettings,
    "retrieval": RetrievalSettings,
    "agreement": AgreementSettings,
    "speed": SpeedSettings,
    "lm_eval": LmEvalSettings,
}
