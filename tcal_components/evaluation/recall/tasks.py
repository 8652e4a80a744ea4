"""Retrieval tasks by distance, written here so that they need no download.

Every example is a list of token ids whose last tokens are the answer. The *distance* is the number of tokens from the
first token of the answer where the text states it to the first token of the answer where the model has to give it.
Pieces are tokenised on their own and then concatenated, so the distance is exact for any tokenizer.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

# fmt: off
_PLACES = [
    "garden", "harbour", "library", "station", "market", "bridge", "forest", "kitchen", "village", "museum", "tower",
    "valley",
]
_THINGS = [
    "lamp", "basket", "letter", "window", "carriage", "clock", "ladder", "blanket", "fence", "kettle", "mirror",
    "wagon",
]
_DEEDS = [
    "was painted last spring", "stood open all day", "is older than the road", "was sold twice", "needs new paint",
]
_WEATHER = ["The rain came late.", "The wind turned north.", "A bell rang twice.", "The path was dry.", "Nobody spoke."]
_KEYS = [
    "amber", "anchor", "apple", "arrow", "autumn", "badger", "barrel", "beacon", "birch", "canyon", "castle",
    "cedar", "cherry", "cobalt", "copper", "coral", "crystal", "dragon", "eagle", "ember", "falcon", "feather",
    "fern", "flint", "galaxy", "ginger", "glacier", "granite", "hazel", "hollow", "indigo", "island", "ivory",
    "jade", "jasper", "juniper", "kestrel", "lantern", "lemon", "lilac", "linen", "lotus", "magnet", "maple",
    "marble", "meadow", "meteor", "mint", "nectar", "nickel", "nutmeg", "oasis", "ocean", "olive", "onyx", "orchid",
    "otter", "pebble", "pepper", "pine", "plum", "prism", "quartz", "raven", "river", "rocket", "saffron", "sage",
    "sapphire", "shadow", "silver", "sparrow", "spruce", "summit", "sunset", "thistle", "thunder", "tiger", "topaz",
    "tulip", "tundra", "velvet", "violet", "walnut",
]
# fmt: on


class Tokenizer(Protocol):
    """What the tasks need of a tokenizer; ``tcal_components.data.hf_tokenizer`` has it."""

    vocab_size: int

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]: ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class Example:
    """One question.

    Attributes:
        tokens: The whole text, answer included.
        answer_length: How many of the last tokens are the answer.
        stated_at: Index of the answer's first token where the text states it.
    """

    tokens: list[int]
    answer_length: int
    stated_at: int

    @property
    def prompt(self) -> list[int]:
        """Everything before the answer."""
        return self.tokens[: -self.answer_length]

    @property
    def answer(self) -> list[int]:
        """The last tokens."""
        return self.tokens[-self.answer_length :]

    @property
    def distance(self) -> int:
        """Tokens from the statement to the question's answer."""
        return len(self.tokens) - self.answer_length - self.stated_at


def _filler(rng: random.Random, tokenizer: Tokenizer, length: int) -> list[int]:
    """``length`` tokens of sentences that say nothing about the question."""
    ids: list[int] = []
    while len(ids) < length:
        place, thing, deed = rng.choice(_PLACES), rng.choice(_THINGS), rng.choice(_DEEDS)
        ids += _encode(tokenizer, f" The {thing} in the {place} {deed}. {rng.choice(_WEATHER)}")
    return ids[:length]


@lru_cache(maxsize=65536)
def _encode_cached(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text))


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(_encode_cached(tokenizer, text))


def _start(tokenizer: Tokenizer) -> list[int]:
    begin, bos = getattr(tokenizer, "begin_ids", []), getattr(tokenizer, "bos_id", None)
    return list(begin) or ([bos] if bos is not None and bos != getattr(tokenizer, "eos_id", None) else [])


def _gap(task: str, distance: int, used: int) -> int:
    if distance < used:
        raise ValueError(f"retrieval task {task}: distance {distance} is too short, its text alone takes {used} tokens")
    return distance - used


def _number(rng: random.Random) -> str:
    return str(rng.randint(10000, 99999))


def _stated(
    rng: random.Random,
    tokenizer: Tokenizer,
    distance: int,
    *,
    task: str,
    statements: list[tuple[str, str, str]],
    question: str,
) -> Example:
    """Statements, each of a text, its value and an end, scattered in filler; ``question`` asks for the first one's value."""
    (lead, value, end), *others = [tuple(_encode(tokenizer, part) for part in parts) for parts in statements]
    asked = _encode(tokenizer, question)
    whole = [[*begin, *number, *stop] for begin, number, stop in others]
    # Half of the other statements stand before the one that is asked for, half after it.
    before, after = whole[: len(whole) // 2], whole[len(whole) // 2 :]
    gap = _gap(task, distance, len(value) + len(end) + sum(map(len, after)) + len(asked))
    tokens = _start(tokenizer) + _scatter(rng, tokenizer, before, 48) + lead
    stated_at = len(tokens)
    tokens += value + end + _scatter(rng, tokenizer, after, gap) + asked + value
    return Example(tokens, len(value), stated_at)


def _needle(rng: random.Random, tokenizer: Tokenizer, distance: int, *, keys: int, task: str) -> Example:
    """``keys`` statements "the number of KEY is N"; one key is asked for."""
    names = rng.sample(_KEYS, keys)
    statements = [(f"\nThe secret number of {name} is", f" {_number(rng)}", ".\n") for name in names]
    question = f"\nQuestion: What is the secret number of {names[0]}?\nAnswer: The secret number of {names[0]} is"
    return _stated(rng, tokenizer, distance, task=task, statements=statements, question=question)


def _scatter(rng: random.Random, tokenizer: Tokenizer, pieces: list[list[int]], filler: int) -> list[int]:
    """``pieces`` at random places within ``filler`` tokens of filler."""
    cuts = sorted(rng.randint(0, filler) for _ in pieces)
    text = _filler(rng, tokenizer, filler)
    out: list[int] = []
    for piece, low, high in zip(pieces, [0, *cuts], cuts):
        out += text[low:high] + piece
    return out + text[cuts[-1] if cuts else 0 :]


def needle(rng: random.Random, tokenizer: Tokenizer, distance: int) -> Example:
    """One key and its number in filler text."""
    return _needle(rng, tokenizer, distance, keys=1, task="needle")


def multikey_needle(rng: random.Random, tokenizer: Tokenizer, distance: int) -> Example:
    """Six keys with numbers in filler text, one of them asked for."""
    return _needle(rng, tokenizer, distance, keys=6, task="multikey_needle")


def extraction(rng: random.Random, tokenizer: Tokenizer, distance: int) -> Example:
    """Six records "key: value" in filler text, then four of them again, the value of the last left out.

    The form in which FDA and SWDE ask (arXiv 2402.18668): the model's answer is what it writes after the key.
    """
    words, things = rng.sample(_KEYS, 6), rng.sample(_THINGS, 6)
    names = [f"{word.capitalize()} {thing}" for word, thing in zip(words, things)]
    statements = [(f"\n{name}:", f" {rng.choice(_KEYS)} {_number(rng)}", "\n") for name in names]
    shown = "".join(name + value for name, value, _ in (statements[1], statements[-1], statements[2]))
    question = f"\n\nSome of the records again:{shown}{statements[0][0]}"
    return _stated(rng, tokenizer, distance, task="extraction", statements=statements, question=question)


_STRING, _CUE = 16, 8


def string_pool(tokenizer: Tokenizer) -> list[int]:
    """Tokens of which random strings are made: every id but those that the tokenizer names as special."""
    pad = "fill_id" if hasattr(tokenizer, "fill_id") else "pad_id"
    special = {getattr(tokenizer, name, None) for name in ("bos_id", "eos_id", pad)}
    special |= set(getattr(tokenizer, "special_ids", ()))
    return [index for index in range(tokenizer.vocab_size) if index not in special]


def copy(rng: random.Random, tokenizer: Tokenizer, distance: int) -> Example:
    """A random string of 16 tokens, filler, the string's first 8 tokens again: the model has to continue with the rest."""
    pool = string_pool(tokenizer)
    string = [rng.choice(pool) for _ in range(_STRING)]
    cue, answer = string[:_CUE], string[_CUE:]
    gap = _gap("copy", distance, len(answer) + len(cue))
    head = _start(tokenizer) + _filler(rng, tokenizer, 16)
    tokens = head + string + _filler(rng, tokenizer, gap) + cue + answer
    return Example(tokens, len(answer), len(head) + _CUE)


def variable_tracking(rng: random.Random, tokenizer: Tokenizer, distance: int) -> Example:
    """A value handed from variable to variable twice, beside a second such chain; the last variable's value is asked for."""
    names = rng.sample([a + b for a in "ABCDEFGHJKLMNPRSTUVWXYZ" for b in "ABCDEFGHJKLMNPRSTUVWXYZ"], 6)
    chain, other = names[:3], names[3:]
    value, other_value = (_encode(tokenizer, f" {_number(rng)}") for _ in range(2))
    end = _encode(tokenizer, ".\n")
    lead = _encode(tokenizer, f"\nVAR {chain[0]} =")

    def links(variables: list[str]) -> list[list[int]]:
        pairs = zip(variables[1:], variables)
        return [_encode(tokenizer, f"\nVAR {new} = VAR {old}") + end for new, old in pairs]

    # The links keep their order within a chain; the two chains are interleaved.
    pieces = [piece for pair in zip(links(chain), links(other)) for piece in pair]
    before = [_encode(tokenizer, f"\nVAR {other[0]} =") + other_value + end]
    question = _encode(tokenizer, f"\nQuestion: What is the value of VAR {chain[-1]}?\nAnswer: VAR {chain[-1]} =")
    gap = _gap("variable_tracking", distance, len(value) + len(end) + sum(map(len, pieces)) + len(question))
    tokens = _start(tokenizer) + _scatter(rng, tokenizer, before, 48) + lead
    stated_at = len(tokens)
    tokens += value + end + _scatter(rng, tokenizer, pieces, gap) + question + value
    return Example(tokens, len(value), stated_at)


TASKS: dict[str, Callable[[random.Random, Tokenizer, int], Example]] = {
    "needle": needle,
    "multikey_needle": multikey_needle,
    "copy": copy,
    "variable_tracking": variable_tracking,
    "extraction": extraction,
}


def make_examples(task: str, tokenizer: Tokenizer, *, distance: int, count: int, seed: int) -> list[Example]:
    """``count`` examples; a function of the arguments alone, on any machine.

    Raises:
        ValueError: For an unknown task or a distance that its text does not fit.
    """
    if task not in TASKS:
        raise ValueError(f"unknown retrieval task {task!r}; allowed: {', '.join(TASKS)}")
    # A string seed is hashed by its bytes: neighbouring seeds and distances give unrelated examples.
    rng = random.Random(f"{task}/{distance}/{seed}")
    return [TASKS[task](rng, tokenizer, distance) for _ in range(count)]


def chance_level(task: str, tokenizer: Tokenizer) -> float:
    """Share of answer tokens that a guess among the tokens possible at each place gets right."""
    if task == "copy":
        return 1.0 / len(string_pool(tokenizer))
    rng = random.Random(0)
    values = [_encode(tokenizer, f" {_number(rng)}") for _ in range(500)]
    shares = []
    for place in range(max(map(len, values))):
        seen = {value[place] for value in values if len(value) > place}
        shares.append((1.0 / len(seen), sum(len(value) > place for value in values)))
    return sum(share * weight for share, weight in shares) / sum(weight for _, weight in shares)
