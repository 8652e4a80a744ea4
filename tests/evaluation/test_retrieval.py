"""Retrieval tasks: deterministic, exact distances, and solvable by an oracle that reads the prompt and nothing else."""

import random
import re

import pytest
import torch

from tcal_components.evaluation.recall.predicted import retrieval, score
from tcal_components.evaluation.recall.tasks import TASKS, chance_level, make_examples, string_pool

_WORDS = re.compile(r" ?[A-Za-z]+| ?\d|\s|.")


class WordTokenizer:
    """Words with their leading space, single digits, single characters; ids in the order of first use."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {"<eos>": 0}
        self.vocab_size = 4000
        self.eos_id = 0
        self.bos_id = None

    def encode(self, text, add_bos=False, add_eos=False):
        return [self.ids.setdefault(piece, len(self.ids)) for piece in _WORDS.findall(text)]

    def decode(self, ids):
        pieces = {index: piece for piece, index in self.ids.items()}
        return "".join(pieces.get(index, "?") for index in ids)


@pytest.fixture
def tokenizer():
    return WordTokenizer()


def _oracle(task: str, tokenizer, prompt: list[int]) -> str | list[int]:
    """Solves a task from its text."""
    if task == "copy":
        cue = prompt[-8:]
        found = [at for at in range(len(prompt) - 8) if prompt[at : at + 8] == cue]
        assert len(found) == 1
        return prompt[found[0] + 8 : found[0] + 16]
    text = tokenizer.decode(prompt)
    if task == "variable_tracking":
        known: dict[str, str] = {}
        for name, source in re.findall(r"VAR (\w+) = (VAR \w+|\d+)\.\n", text):
            known[name] = known[source.split()[1]] if source.startswith("VAR") else source
        return known[re.search(r"value of VAR (\w+)\?", text).group(1)]
    if task == "extraction":
        records = dict(re.findall(r"^(\w+ \w+): (\w+ \d{5})$", text, re.MULTILINE))
        assert len(records) == 6
        return records[text[text.rindex("\n") + 1 :].removesuffix(":")]
    facts = re.findall(r"The secret number of (\w+) is (\d+)\.", text)
    assert len(facts) == (6 if task == "multikey_needle" else 1)
    return dict(facts)[re.search(r"What is the secret number of (\w+)\?", text).group(1)]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("distance", [300, 1000])
def test_oracle_solves_every_example_at_the_exact_distance(task, distance, tokenizer):
    for example in make_examples(task, tokenizer, distance=distance, count=12, seed=5):
        assert example.distance == distance
        assert example.tokens[example.stated_at :][: example.answer_length] == example.answer
        found = _oracle(task, tokenizer, example.prompt)
        if task == "copy":
            assert found == example.answer
        else:
            assert f" {found}" == tokenizer.decode(example.answer)
            assert tokenizer.decode(example.prompt).count(found) == 1  # stated once, nowhere else


@pytest.mark.parametrize("task", TASKS)
def test_deterministic_in_the_seed_and_nothing_else(task, tokenizer):
    one = make_examples(task, tokenizer, distance=400, count=4, seed=1)
    random.seed(0)
    torch.manual_seed(0)
    assert make_examples(task, tokenizer, distance=400, count=4, seed=1) == one
    assert make_examples(task, tokenizer, distance=400, count=2, seed=1) == one[:2]
    assert make_examples(task, tokenizer, distance=400, count=4, seed=2) != one
    assert len({tuple(example.answer) for example in one}) == 4


def test_chance_is_of_a_guess_among_possible_tokens(tokenizer):
    assert chance_level("copy", tokenizer) == 1 / len(string_pool(tokenizer)) == 1 / 3999
    # Five digits; the first is 1 to 9 with its space in front, the others 0 to 9.
    assert chance_level("needle", tokenizer) == pytest.approx((1 / 9 + 4 / 10) / 5)


class Reader(torch.nn.Module):
    """A decoder that looks up, wherever it stands, what the oracle would answer; it sees the tokens up to there only."""

    def __init__(self, examples, right: int | None = None) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.examples, self.right = examples, right

    def hidden(self, tokens, *, mask=None, input_pos=None):
        out = torch.zeros(*tokens.shape, 4000)
        for example in self.examples:
            start = len(example.prompt)
            for row in range(tokens.shape[0]):
                if tokens[row, :start].tolist() == example.prompt:
                    for offset, token in enumerate(example.answer[: self.right]):
                        out[row, start - 1 + offset, token] = 1.0
        return out

    def output(self, hidden):
        return hidden


def test_score_counts_tokens_and_whole_answers(tokenizer):
    examples = make_examples("needle", tokenizer, distance=200, count=5, seed=0)
    assert score(Reader(examples), examples, batch_size=2) == (1.0, 1.0)
    accuracy, exact = score(Reader(examples, right=4), examples, batch_size=3)
    assert accuracy == pytest.approx(0.8) and exact == 0.0


def test_models_of_both_kinds_give_the_same_rows(hf_pair, tokenizer):
    class Small(WordTokenizer):
        def encode(self, text, add_bos=False, add_eos=False):
            return [index % 60 + 1 for index in super().encode(text)]

    small = Small()
    small.vocab_size = 61
    for model in hf_pair:
        model.max_seq_len = 512
    kwargs = {"tasks": ("needle", "copy"), "distances": (60, 90), "examples": 4, "batch_size": 3}
    theirs, ours = (retrieval(model, small, **kwargs) for model in hf_pair)
    assert [(row.task, row.distance) for row in ours] == [("needle", 60), ("needle", 90), ("copy", 60), ("copy", 90)]
    assert ours == theirs
    assert all(0 <= row.accuracy < 0.5 and row.examples == 4 for row in ours)


def test_mistakes_are_one_line(tokenizer):
    with pytest.raises(ValueError, match="unknown retrieval task 'needles'; allowed: needle, multikey_needle, copy"):
        make_examples("needles", tokenizer, distance=100, count=1, seed=0)
    with pytest.raises(ValueError, match="distance 5 is too short"):
        make_examples("needle", tokenizer, distance=5, count=1, seed=0)
