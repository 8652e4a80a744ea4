"""What a student writes after held-out prompts, beside what its teacher writes.

Perplexity shows the model nothing but right text; here it reads what it wrote before, so its own errors count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from tcal_components.config import Count, Length, Range, Settings
from tcal_components.data.packed import IGNORE_INDEX
from tcal_components.evaluation.access import device_of, evaluating
from tcal_components.evaluation.perplexity import token_nll
from tcal_components.evaluation.written import written
from tcal_components.modules.sampling import Sampling

NGRAM = 4  # tokens of a piece that counts as repeated
_SCORED_TOKENS = 16384  # that go through the teacher at once
_FURTHER = 2**20  # between the seeds of two sets of samples: more than there are prompts


@dataclass(frozen=True)
class GenerationConfig(Settings):
    """Section ``generation``: continuations of the evaluation text; null leaves them out.

    Attributes:
        prompts: How many; each is the beginning of a document, or of a sequence where there are too few documents.
        prompt_tokens: Of each; of a document that is too short for them, its first half.
        new_tokens: Made for each, greedy and once more sampled; the end of a document ends nothing.
        temperature: Of the samples.
        batch_size: Prompts continued at once.
    """

    prompts: Count = 16
    prompt_tokens: Length = 32
    new_tokens: Annotated[int, Range(NGRAM, 2**20)] = 32
    temperature: Annotated[float, Range(above=0, most=100)] = 1.0
    batch_size: Count = 256

    @property
    def length(self) -> int:
        """Tokens of the longest prompt with its continuation."""
        return self.prompt_tokens + self.new_tokens


@dataclass(frozen=True)
class Continuations:
    """What a model writes after each prompt.

    Attributes:
        greedy: Its most likely tokens.
        sampled: Drawn tokens.
    """

    greedy: list[list[int]]
    sampled: list[list[int]]

    @property
    def tokens(self) -> int:
        """How many were made."""
        return sum(map(len, (*self.greedy, *self.sampled)))


def choose_prompts(dataset: Any, *, count: int, tokens: int) -> list[list[int]]:
    """Beginnings of documents, evenly spread over the text; the same for every model.

    Args:
        dataset: A packed text, see :class:`~tcal_components.data.PackedTextDataset`.
        count: At most so many.
        tokens: Of each; of a shorter document its first half.

    Returns:
        list: Token ids of each.
    """
    rows = len(dataset) * dataset.seq_len
    spans = [(document.start, min(document.start + document.length, rows)) for document in dataset.documents]
    if len(spans) < count:  # few long documents: sequences begin inside of them
        inside = [
            (place, end)
            for begin, end in spans
            for place in range((begin // dataset.seq_len + 1) * dataset.seq_len, end, dataset.seq_len)
        ]
        spans = sorted([*spans, *inside])
    spans = [(begin, end) for begin, end in spans if end - begin > 1]
    chosen = [spans[index * len(spans) // count] for index in range(count)] if len(spans) > count else spans
    # Half at least is left out, so that the text goes on where the prompt ends.
    return [dataset.tokens[begin : begin + min(tokens, (end - begin) // 2)].tolist() for begin, end in chosen]


def continuations(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    *,
    seed: int = 0,
    autocast_dtype: torch.dtype | None = None,
    progress: str | None = None,
) -> Continuations:
    """Continues every prompt, greedily and by drawing tokens.

    Args:
        model: A HybridDecoder (plain or sharded by FSDP2) or a causal language model of transformers.
        prompts: See :func:`choose_prompts`.
        config: The numbers.
        seed: Of the drawn tokens: models with the same one draw alike.
        autocast_dtype: Compute under autocast to this type.
        progress: Label of a progress bar; None shows none.

    Returns:
        Continuations: The same in all processes.
    """
    options: dict[str, Any] = {"max_new_tokens": config.new_tokens, "batch_size": config.batch_size}
    options |= {"autocast_dtype": autocast_dtype, "progress": progress}
    return Continuations(
        greedy=written(model, prompts, **options),
        sampled=written(model, prompts, sampling=Sampling(config.temperature), seed=seed * _FURTHER, **options),
    )


def nll_of(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    *,
    autocast_dtype: torch.dtype | None = None,
) -> list[float]:
    """How unlikely a model finds each text after its prompt.

    Args:
        model: As in :func:`continuations`.
        prompts: Token ids.
        texts: Token ids that follow them.
        autocast_dtype: Compute under autocast to this type.

    Returns:
        list[float]: Mean negative log-likelihood in nats a token of each text.
    """
    device, found = device_of(model), []
    longest = max(len(prompt) + len(text) for prompt, text in zip(prompts, texts))
    share = max(1, _SCORED_TOKENS // longest)
    with evaluating(model, device=device, autocast_dtype=autocast_dtype):
        for begin in range(0, len(prompts), share):
            part = slice(begin, begin + share)
            batch = _scored(prompts[part], texts[part])
            nll = token_nll(model, {name: value.to(device) for name, value in batch.items()}).sum(1).tolist()
            found += [value / len(text) for value, text in zip(nll, texts[part])]
    return found


def _scored(prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """A batch whose labels are the texts'. Padded on the right, which a causal model's texts do not see."""
    rows = [[*prompt, *text] for prompt, text in zip(prompts, texts)]
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    labels = torch.full_like(tokens, IGNORE_INDEX)
    for index, (row, text) in enumerate(zip(rows, texts)):
        tokens[index, : len(row)] = torch.tensor(row)
        labels[index, len(row) - len(text) - 1 : len(row) - 1] = torch.tensor(text)
    return {"tokens": tokens, "labels": labels}


def agreeing_tokens(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens at the beginning in which two texts agree."""
    equal = [a == b for a, b in zip(first, second)]
    return equal.index(False) if False in equal else len(equal)


def repetition(texts: Sequence[Sequence[int]]) -> float:
    """Share of the pieces of ``NGRAM`` tokens that occurred before in the same text; 0 where there is none."""
    pieces = repeated = 0
    for text in texts:
        seen = [tuple(text[place : place + NGRAM]) for place in range(len(text) - NGRAM + 1)]
        pieces, repeated = pieces + len(seen), repeated + len(seen) - len(set(seen))
    return repeated / pieces if pieces else 0.0


@dataclass(frozen=True)
class ContinuationScores:
    """A model's continuations beside its teacher's.

    Attributes:
        equal: Share of the greedy tokens that are the teacher's at the same place.
        agreement: Greedy tokens at the beginning that are the teacher's, mean over the prompts.
        win_or_tie: Share of prompts after which the teacher finds the model's greedy text at least as likely as its own.
        teacher_nll: Of the model's greedy and sampled text, in nats a token.
        repetition: Of both, see :func:`repetition`.
    """

    equal: float
    agreement: float
    win_or_tie: float
    teacher_nll: Mapping[str, float]
    repetition: Mapping[str, float]

    def as_dict(self) -> dict[str, Any]:
        """The entry of a report's ``continuations``."""
        return {
            "equal_tokens": self.equal,
            "agreement_tokens": self.agreement,
            "teacher_nll": dict(self.teacher_nll),
            "repetition": dict(self.repetition),
        }


def score_continuations(
    teacher: nn.Module,
    prompts: Sequence[Sequence[int]],
    reference: Continuations,
    own: Continuations,
    *,
    autocast_dtype: torch.dtype | None = None,
) -> ContinuationScores:
    """Compares what a model writes with what its teacher writes, in the teacher's eyes.

    Args:
        teacher: The teacher.
        prompts: Token ids.
        reference: Of the teacher.
        own: Of the model; ``reference`` itself for the teacher's own row.
        autocast_dtype: Compute under autocast to this type.

    Returns:
        ContinuationScores: The numbers.
    """
    options = {"autocast_dtype": autocast_dtype}
    nll = {name: nll_of(teacher, prompts, getattr(own, name), **options) for name in ("greedy", "sampled")}
    theirs = nll["greedy"] if own is reference else nll_of(teacher, prompts, reference.greedy, **options)
    equal = [[a == b for a, b in zip(*texts)] for texts in zip(own.greedy, reference.greedy)]
    # Equal texts are a tie, whatever rounding made of their likelihoods.
    ties = [all(row) or ours <= other for row, ours, other in zip(equal, nll["greedy"], theirs)]
    return ContinuationScores(
        equal=sum(map(sum, equal)) / sum(map(len, equal)),
        agreement=sum(map(agreeing_tokens, own.greedy, reference.greedy)) / len(prompts),
        win_or_tie=sum(ties) / len(ties),
        teacher_nll={name: sum(values) / len(values) for name, values in nll.items()},
        repetition={name: repetition(getattr(own, name)) for name in ("greedy", "sampled")},
    )


def text_samples(
    tokenizer: Any, prompts: Sequence[Sequence[int]], texts: Mapping[str, Continuations], *, count: int = 2
) -> dict[str, Any]:
    """The section ``samples`` of a report: some prompts with what each model writes greedily, as text.

    Args:
        tokenizer: With ``decode``.
        prompts: That were continued.
        texts: By model.
        count: At most so many, evenly spread over the prompts.
    """

    def continued(prompt: Sequence[int], text: Sequence[int]) -> str:
        # Decoded together: a tokenizer may drop the space that a text begins with.
        before, whole = tokenizer.decode(list(prompt)), tokenizer.decode([*prompt, *text])
        return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(list(text))

    chosen = (
        [len(prompts) * number // count for number in range(count)] if len(prompts) > count else range(len(prompts))
    )
    rows = [
        {
            "prompt": tokenizer.decode(list(prompts[place])),
            "texts": {name: continued(prompts[place], own.greedy[place]) for name, own in texts.items()},
        }
        for place in chosen
    ]
    return {"samples": rows}


def continuation_report(
    config: GenerationConfig, prompts: Sequence[Sequence[int]], scores: Mapping[str, ContinuationScores]
) -> dict[str, Any]:
    """The sections ``generation`` and ``continuations`` of a report.

    In ``generation``, the accuracy of a continuation is the share of its greedy tokens that are the teacher's. What lies
    outside of 0 to 1 stands in ``continuations``.

    Args:
        config: The numbers.
        prompts: That were continued.
        scores: By model, the teacher first, then the student that ``win_or_tie`` is of.
    """
    names = list(scores)
    row = {name: score.equal for name, score in scores.items()}
    if len(names) > 1:
        row["win_or_tie"] = scores[names[1]].win_or_tie
    settings = {"prompts": len(prompts), "new_tokens": config.new_tokens, "temperature": config.temperature}
    models = {name: {**score.as_dict(), "win_or_tie": score.win_or_tie} for name, score in scores.items()}
    return {"generation": {"continuation": row}, "continuations": {**settings, "models": models}}
