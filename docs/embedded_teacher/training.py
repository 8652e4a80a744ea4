"""Components that train the embedded teacher from scratch with torchtune's own full-finetune recipe.

The recipe wants a checkpointer with weights to begin from and a dataset of unshifted labels; these are
:class:`FromScratchCheckpointer` and :func:`teacher_mixture`. ``docs/embedded_teacher/train.yaml`` puts them together.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import Dataset

from tcal_components.assets import resolve
from tcal_components.checkpoint.names import torchtune_to_hf
from tcal_components.data import IGNORE_INDEX, HFTokenizer, packed_text
from tcal_components.models import teacher
from tcal_components.models.hf_config import read_spec
from tcal_components.precision.dtypes import parse_dtype


class FromScratchCheckpointer:
    """Random weights in, a Hugging Face folder out.

    Args:
        checkpoint_dir (str): folder with config.json and the tokenizer's files.
        output_dir (str): receives model.safetensors and a copy of those files.
        seed (int): of the random weights.
        embedding_std (float): standard deviation of the random embedding, see :func:`initialize_weights`.
        dtype (str): of the weights written: "bf16" or "fp32".
        should_load_recipe_state (bool): set by torchtune to resume a run; not available here.

    Raises:
        ValueError: for resuming, or another dtype.
    """

    def __init__(
        self,
        *,
        checkpoint_dir: str,
        output_dir: str,
        seed: int = 0,
        embedding_std: float = 0.02,
        dtype: str = "bf16",
        should_load_recipe_state: bool = False,
    ) -> None:
        if should_load_recipe_state:
            raise ValueError("training from scratch cannot be resumed; set resume_from_checkpoint: False")
        self._folder = resolve(checkpoint_dir)
        self._output = Path(output_dir)
        self._seed = seed
        self._embedding_std = embedding_std
        self._dtype = parse_dtype(dtype, "checkpointer.dtype")

    def load_checkpoint(self) -> dict[str, Any]:
        """``{"model": random weights by torchtune name}``, in float32."""
        model = teacher(checkpoint_dir=self._folder)
        initialize_weights(model, seed=self._seed, embedding_std=self._embedding_std)
        return {"model": {name: value.float() for name, value in model.state_dict().items()}}

    def save_checkpoint(
        self, state_dict: dict[str, Any], epoch: int, intermediate_checkpoint: bool = False, **unused: Any
    ) -> None:
        """Writes the folder; the one of a later epoch replaces it."""
        self._output.mkdir(parents=True, exist_ok=True)
        weights = torchtune_to_hf(state_dict["model"], read_spec(self._folder))
        weights = {name: value.detach().to("cpu", self._dtype).contiguous() for name, value in weights.items()}
        path = self._output / "model.safetensors"
        save_file(weights, str(path), metadata={"format": "pt"})
        path.chmod(0o644)  # safetensors writes it readable for the owner only
        for file in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
            source, target = self._folder / file, self._output / file
            if source.is_file() and source.resolve() != target.resolve():
                shutil.copyfile(source, target)


def initialize_weights(model: nn.Module, *, seed: int, embedding_std: float = 0.02) -> None:
    """Random weights as usual for a decoder of this size.

    Matrices are normal with variance 1 / fan-in, those that write to the residual stream smaller by
    sqrt(2 x layers), so that the stream's variance does not grow with depth; norms are 1 and biases 0. The embedding is
    tied to the head: with a standard deviation above 0.02, which keeps a token's identity readable in the stream beside
    what the layers add, the last norm's scale starts so much smaller that the logits do not grow.
    """
    generator = torch.Generator().manual_seed(seed)
    depth = sum(name.endswith("sa_norm.scale") for name, _ in model.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                if name == "norm.scale":
                    parameter.mul_(min(1.0, 0.02 / embedding_std))
                continue
            std = embedding_std if "embedding" in name else parameter.shape[1] ** -0.5
            if name.endswith(("output_proj.weight", "w2.weight")):
                std *= (2 * depth) ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


class TeacherMixture(Dataset):
    """Text mixed with sequences that only copying and recall can predict.

    Kinds of sequences, each item's kind and content a function of (seed, index):

    - text: a window of the training text;
    - strings: strings over a random alphabet of 8 tokens up to the whole vocabulary, 4 to 200 tokens long, each written
      2 to 4 times, half the time with as many random tokens between;
    - passages: text in which a passage comes again later;
    - recall: a list of random keys with values, then the keys again in another order, each with its value.

    Labels are -100 where nothing can be predicted (first occurrences of random tokens, fillers, keys), so that the loss
    of these kinds is about copying alone.

    Args:
        text (np.ndarray): [N] token ids, documents separated by the end-of-sequence id.
        vocab_size (int): random tokens are uniform over 1 .. vocab_size - 1.
        separator (int): token id between a list of keys and its questions, and after each pair.
        seq_len (int): T.
        num_sequences (int): length of the dataset.
        shares (dict[str, float]): weight of each kind.
        growth (float): share of the dataset over which the tokens in use and the longest string grow, from 32 and 16: few
            tokens and short strings show how copying works, the rest spreads it. 0: full size at once.
        seed (int): of everything random.
    """

    def __init__(
        self,
        text: np.ndarray,
        *,
        vocab_size: int,
        separator: int,
        seq_len: int,
        num_sequences: int,
        shares: dict[str, float],
        growth: float = 0.0,
        seed: int,
    ) -> None:
        kinds: dict[str, Callable[[np.random.Generator, float], tuple[np.ndarray, np.ndarray]]] = {
            "text": self._text_row,
            "strings": self._strings_row,
            "passages": self._passages_row,
            "recall": self._recall_row,
        }
        if not 0.0 <= growth <= 1.0:
            raise ValueError(f"growth must be a share in [0, 1], got {growth}")
        if unknown := set(shares) - set(kinds):
            raise ValueError(f"unknown kind in shares: {', '.join(sorted(unknown))}; there are: {', '.join(kinds)}")
        if not shares or min(shares.values()) < 0 or sum(shares.values()) <= 0:
            raise ValueError(f"shares must be >= 0 and not all 0, got {shares}")
        if seq_len < 64:
            raise ValueError(f"seq_len must be at least 64 for sequences with repetitions, got {seq_len}")
        self._rows = [kinds[name] for name in shares]
        self._weights = np.cumsum(list(shares.values())) / sum(shares.values())
        self._source = np.asarray(text, dtype=np.int64)
        self._vocab_size = vocab_size
        self._separator = separator
        self._seq_len = seq_len
        self._num_sequences = num_sequences
        self._growing = growth * num_sequences
        self._order = 1 + np.random.default_rng(seed).permutation(vocab_size - 1)
        self._seed = seed

    def __len__(self) -> int:
        return self._num_sequences

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """``tokens`` and unshifted ``labels`` [T]."""
        if not 0 <= index < self._num_sequences:
            raise IndexError(f"sequence {index} of {self._num_sequences}")
        generator = np.random.default_rng([self._seed, index])
        kind = int(np.searchsorted(self._weights, generator.random(), side="right"))
        size = min(1.0, index / self._growing) if self._growing else 1.0
        tokens, learned = self._rows[min(kind, len(self._rows) - 1)](generator, size)
        return {"tokens": tokens, "labels": np.where(learned, tokens, IGNORE_INDEX)}

    def _random(self, generator: np.random.Generator, count: int) -> np.ndarray:
        return generator.integers(1, self._vocab_size, count)

    def _window(self, generator: np.random.Generator, length: int) -> np.ndarray:
        begin = int(generator.integers(0, len(self._source) - length + 1))
        return self._source[begin : begin + length]

    def _text_row(self, generator: np.random.Generator, size: float) -> tuple[np.ndarray, np.ndarray]:
        return self._window(generator, self._seq_len), np.ones(self._seq_len, dtype=bool)

    def _strings_row(self, generator: np.random.Generator, size: float) -> tuple[np.ndarray, np.ndarray]:
        longest = _between(16, min(200, self._seq_len // 2), size)
        in_use = self._order[: _between(min(32, len(self._order)), len(self._order), size)]
        letters = _log_uniform(generator, min(8, len(in_use)), len(in_use))
        alphabet = generator.choice(in_use, letters, replace=False)
        pieces: list[tuple[np.ndarray, bool]] = []
        total = 0
        while total < self._seq_len:
            string = generator.choice(alphabet, _log_uniform(generator, 4, longest))
            pieces.append((string, False))
            for _ in range(int(generator.integers(1, 4))):
                gap = int(generator.integers(0, longest + 1)) if generator.random() < 0.5 else 0
                pieces += [(generator.choice(alphabet, gap), False), (string, True)]
            total = sum(len(piece) for piece, _ in pieces)
        tokens = np.concatenate([piece for piece, _ in pieces])[: self._seq_len]
        # A copy's first token cannot be known; the rest can.
        learned = np.concatenate([(np.arange(len(piece)) > 0) & copy for piece, copy in pieces])[: self._seq_len]
        return tokens, learned

    def _passages_row(self, generator: np.random.Generator, size: float) -> tuple[np.ndarray, np.ndarray]:
        length = int(generator.integers(16, self._seq_len // 3))
        passage = self._window(generator, length)
        first = int(generator.integers(0, self._seq_len - 2 * length + 1))
        second = int(generator.integers(first + length, self._seq_len - length + 1))
        tokens = self._window(generator, self._seq_len).copy()
        tokens[first : first + length] = passage
        tokens[second : second + length] = passage
        return tokens, np.ones(self._seq_len, dtype=bool)

    def _recall_row(self, generator: np.random.Generator, size: float) -> tuple[np.ndarray, np.ndarray]:
        tokens: list[np.ndarray] = []
        learned: list[np.ndarray] = []
        total = 0
        while total < self._seq_len:
            pairs = int(generator.integers(2, 25))
            key, value = int(generator.integers(1, 3)), int(generator.integers(1, 3))
            # Distinct first tokens make every key unambiguous.
            table = self._random(generator, pairs * (key + value + 1)).reshape(pairs, -1)
            table[:, 0] = 1 + generator.permutation(self._vocab_size - 1)[:pairs]
            table[:, -1] = self._separator
            answers = np.zeros_like(table, dtype=bool)
            answers[:, key : key + value] = True
            tokens += [table.ravel(), np.array([self._separator]), table[generator.permutation(pairs)].ravel()]
            learned += [np.zeros(table.size + 1, dtype=bool), answers.ravel()]
            total += 2 * table.size + 1
        return np.concatenate(tokens)[: self._seq_len], np.concatenate(learned)[: self._seq_len]


def _log_uniform(generator: np.random.Generator, least: int, most: int) -> int:
    """A length of least .. most, every order of magnitude as likely as another."""
    return min(most, int(np.exp(generator.uniform(np.log(least), np.log(most + 1)))))


def _between(first: int, last: int, share: float) -> int:
    """From ``first`` (share 0) to ``last`` (share 1), by equal factors."""
    return round(first ** (1.0 - share) * last**share)


def teacher_mixture(
    tokenizer: HFTokenizer,
    *,
    source: str,
    seq_len: int = 512,
    num_sequences: int,
    shares: dict[str, float] | None = None,
    growth: float = 0.0,
    seed: int = 0,
) -> TeacherMixture:
    """Dataset component, see :class:`TeacherMixture`.

    Args:
        tokenizer (HFTokenizer): of the teacher.
        source (str): training text, anything that :func:`tcal_components.data.packed_text` reads.
        seq_len (int): T.
        num_sequences (int): length of the dataset = optimizer steps x batch size.
        shares (dict[str, float] | None): weight of each kind. None: the shares that trained the embedded teacher.
        growth (float): share of the dataset over which alphabets and strings grow.
        seed (int): of everything random.
    """
    text = packed_text(tokenizer, source=source, seq_len=seq_len)
    return TeacherMixture(
        text.tokens,
        vocab_size=tokenizer.vocab_size,
        separator=tokenizer.encode("\n")[0],
        seq_len=seq_len,
        num_sequences=num_sequences,
        shares=dict(shares or {"text": 0.5, "strings": 0.3, "passages": 0.1, "recall": 0.1}),
        growth=growth,
        seed=seed,
    )


def stack_rows(batch: list[dict[str, np.ndarray]], **unused: Any) -> dict[str, torch.Tensor]:
    """Collate function for rows of one length: ``tokens`` and ``labels`` [B, T]. Padding arguments are not needed."""
    return {name: torch.from_numpy(np.stack([row[name] for row in batch])) for name in ("tokens", "labels")}
