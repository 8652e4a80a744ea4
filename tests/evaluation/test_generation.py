"""What models write, and how it is compared with what their teacher writes."""

import math
from dataclasses import dataclass

import pytest
import torch

from tcal_components.config import ConfigError
from tcal_components.evaluation.generation import (
    Continuations,
    GenerationConfig,
    agreeing_tokens,
    choose_prompts,
    continuation_report,
    continuations,
    nll_of,
    repetition,
    score_continuations,
)
from tcal_components.evaluation.recall.answers import answer_report, answers, win_or_tie
from tcal_components.evaluation.recall.tasks import Example
from tcal_components.evaluation.written import written
from tcal_components.modules.sampling import Sampling

PROMPTS = [[5, 9, 2], [7], [30, 31, 32, 33, 34], [8, 1, 4]]
SMALL = GenerationConfig(prompts=4, prompt_tokens=5, new_tokens=6, temperature=50.0)  # its logits are far apart


@dataclass
class Text:
    """A packed text of documents of the given lengths."""

    lengths: list
    seq_len: int = 10

    def __post_init__(self):
        self.tokens = torch.arange(sum(self.lengths)).numpy()
        starts = [sum(self.lengths[:index]) for index in range(len(self.lengths))]
        self.documents = [Span(start, length) for start, length in zip(starts, self.lengths)]

    def __len__(self):
        return len(self.tokens) // self.seq_len


@dataclass
class Span:
    start: int
    length: int


def test_prompts_are_beginnings_of_documents():
    text = Text([6, 14, 1, 3, 26])
    assert choose_prompts(text, count=4, tokens=4) == [[0, 1, 2], [6, 7, 8, 9], [21], [24, 25, 26, 27]]
    assert choose_prompts(text, count=2, tokens=2) == [[0, 1], [21]]
    # Of one long document each sequence gives one; its end is always left to be continued.
    assert choose_prompts(Text([39]), count=3, tokens=4) == [[0, 1, 2, 3], [10, 11, 12, 13], [20, 21, 22, 23]]
    assert choose_prompts(Text([39]), count=9, tokens=4) == choose_prompts(Text([39]), count=3, tokens=4)
    assert choose_prompts(Text([1] * 10), count=3, tokens=4) == []


def test_agreement_and_repetition_count_tokens():
    assert agreeing_tokens([1, 2, 3], [1, 2, 3]) == 3
    assert agreeing_tokens([1, 2, 3], [1, 9, 3]) == 1 and agreeing_tokens([1], [2]) == 0
    assert repetition([[1, 2, 3, 4, 5, 6]]) == 0
    assert repetition([[1, 1, 1, 1, 1, 1], [1, 2, 3, 4]]) == 2 / 4  # 3 pieces of which 2 were there before, and 1
    assert repetition([[1, 2, 3]]) == 0


def test_likelihood_is_that_of_the_text_alone(teacher):
    texts = [[4, 4], [9], [1, 2, 3], [60]]
    expected = []
    for prompt, text in zip(PROMPTS, texts):
        with torch.no_grad():
            logs = teacher(torch.tensor([prompt + text]))[0].log_softmax(-1)
        places = range(len(prompt) - 1, len(prompt) + len(text) - 1)
        expected.append(-sum(float(logs[place, token]) for place, token in zip(places, text)) / len(text))
    assert nll_of(teacher, PROMPTS, texts) == pytest.approx(expected, rel=1e-5)


def test_the_teacher_agrees_with_itself_and_a_student_is_compared_with_it(teacher, hybrid):
    own = continuations(teacher, PROMPTS, SMALL)
    assert own.tokens == 2 * 4 * 6
    itself = score_continuations(teacher, PROMPTS, own, own)
    assert (itself.equal, itself.agreement, itself.win_or_tie) == (1, 6, 1)
    assert itself.teacher_nll["greedy"] < itself.teacher_nll["sampled"]
    with torch.no_grad():  # as it is made, it repeats the last token, as the teacher does
        for parameter in hybrid.layers.parameters():
            parameter.mul_(8.0)
    students = continuations(hybrid, PROMPTS, SMALL)
    scores = score_continuations(teacher, PROMPTS, own, students)
    assert scores.teacher_nll["greedy"] == pytest.approx(sum(nll_of(teacher, PROMPTS, students.greedy)) / 4, rel=1e-6)
    assert scores.equal < 1 and scores.agreement < 6
    # A student that writes the same wins or ties whatever the rounding; so does one that the teacher finds likelier.
    same = Continuations([list(row) for row in own.greedy], own.sampled)
    assert score_continuations(teacher, PROMPTS, own, same).win_or_tie == 1
    assert score_continuations(teacher, PROMPTS, students, own).win_or_tie == 1
    section = continuation_report(SMALL, PROMPTS, {"teacher": itself, "student": scores})
    assert section["generation"] == {
        "continuation": {"teacher": 1.0, "student": scores.equal, "win_or_tie": scores.win_or_tie}
    }
    assert section["continuations"]["models"]["student"]["teacher_nll"] == scores.teacher_nll


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)], ids=["greedy", "sampled"])
def test_transformers_models_write_the_same_text(hf_pair, sampling):
    theirs, ours = (model.double() for model in hf_pair)
    options = {"max_new_tokens": 8, "sampling": sampling, "seed": 3}
    text = written(ours, PROMPTS, **options)
    assert written(theirs, PROMPTS, **options) == text
    assert written(theirs, PROMPTS, batch_size=1, **options) == text
    theirs.config.use_cache = False  # as in an export without attention
    assert written(theirs, PROMPTS, **options) == text


def test_answers_are_what_the_model_writes(teacher):
    text = written(teacher, PROMPTS, max_new_tokens=3)
    right = [Example(prompt + made, 3, 0) for prompt, made in zip(PROMPTS, text)]
    short = Example(PROMPTS[0] + text[0][:2], 2, 0)
    wrong = Example(PROMPTS[1] + text[1][:2] + [(text[1][2] + 1) % 61], 3, 0)
    assert answers(teacher, [*right, short, wrong], batch_size=2) == [True] * 5 + [False]


def test_win_or_tie_is_by_example():
    teacher = {("needle", 8): [True, True, False, False], ("needle", 9): [True, False]}
    student = {("needle", 8): [True, False, True, False], ("needle", 9): [False, False]}
    assert win_or_tie(student["needle", 8], teacher["needle", 8]) == 0.75
    found = answer_report({"teacher": teacher, "mine": student, "other": teacher})
    assert found["generation"] == {"needle": {"teacher": 0.5, "mine": 2 / 6, "other": 0.5, "win_or_tie": 4 / 6}}
    row = found["evaluation"]["answers"][3]
    assert row == {"model": "mine", "task": "needle", "distance": 9, "examples": 2, "exact": 0.0, "win_or_tie": 0.5}


def test_numbers_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="new_tokens is 3, expected at least 4"):
        GenerationConfig(new_tokens=3)
    with pytest.raises(ConfigError, match="temperature is 0"):
        GenerationConfig(temperature=0)
    assert math.isclose(GenerationConfig(temperature="0.5").temperature, 0.5)
