"""Does the model copy? Accuracy on the second occurrence of random strings."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


def random_copies(
    *, num_sequences: int, distance: int, string_length: int, vocab_size: int, seed: int, reserved: Sequence[int] = ()
) -> torch.Tensor:
    """Rows [random string][random filler][the same string], so that every token of the copy stood ``distance`` before.

    Args:
        num_sequences (int): rows.
        distance (int): tokens from a token to its copy, at least ``string_length``.
        string_length (int): tokens of the string.
        vocab_size (int): tokens are uniform over 0 .. vocab_size - 1 without ``reserved``.
        seed (int): of the tokens.
        reserved (Sequence[int]): ids that are not used, such as the end of a document.

    Returns:
        torch.Tensor: [num_sequences, distance + string_length], int64, on the CPU.

    Raises:
        ValueError: if the numbers do not fit each other.
    """
    if not 2 <= string_length <= distance:
        raise ValueError(f"string_length must be in 2..distance, got {string_length} for distance {distance}")
    allowed = torch.tensor([token for token in range(vocab_size) if token not in set(reserved)])
    if len(allowed) < 2:
        raise ValueError(f"vocab_size {vocab_size} leaves no tokens to copy without the {len(reserved)} reserved ones")
    generator = torch.Generator().manual_seed(seed)
    first = allowed[torch.randint(len(allowed), (num_sequences, distance), generator=generator)]
    return torch.cat([first, first[:, :string_length]], dim=1)


@torch.no_grad()
def copy_accuracy(
    model: nn.Module,
    *,
    vocab_size: int,
    distances: Sequence[int] = (16, 64, 128, 256),
    string_length: int = 16,
    num_sequences: int = 32,
    batch_size: int = 8,
    seed: int = 0,
    reserved: Sequence[int] = (),
    device: torch.device | str | None = None,
) -> dict[str, Any]:
    """Share of right next-token predictions on the second occurrence of random strings, by distance.

    Only an induction mechanism can be right here: the strings are uniformly random, so a guess is right with
    probability 1 / vocab_size. The first token of a copy cannot be known and does not count.

    Args:
        model (nn.Module): ``model(tokens [B, T]) -> logits [B, T, V]``.
        vocab_size (int): random tokens are below it (the tokenizer's size; the model's may be padded).
        distances (Sequence[int]): tokens from a token to its copy. The longest sequence is
            ``max(distances) + string_length``.
        string_length (int): tokens of each string, of which all but the first are counted.
        num_sequences (int): strings for each distance.
        batch_size (int): strings a forward.
        seed (int): of the strings.
        reserved (Sequence[int]): ids that are not used, such as the end of a document.
        device (torch.device | str | None): of the model. None: that of its first parameter.

    Returns:
        dict[str, Any]: ``accuracy`` (mean over distances), ``chance``, ``tokens`` (predictions for each distance) and
        ``by_distance`` {distance: accuracy}.

    Raises:
        ValueError: if ``string_length`` is not in 2..distance for every distance, or there is none.
    """
    if not distances:
        raise ValueError("copy_accuracy needs at least one distance")
    if device is None:
        device = next(model.parameters()).device
    training = model.training
    model.eval()
    by_distance = {}
    for distance in distances:
        rows = random_copies(
            num_sequences=num_sequences,
            distance=distance,
            string_length=string_length,
            vocab_size=vocab_size,
            seed=seed,
            reserved=reserved,
        )
        right = 0
        for part in rows.split(batch_size):
            tokens = part.to(device)
            # Position t predicts token t + 1; the copy is at distance .. distance + string_length - 1.
            predicted = model(tokens)[:, distance:-1].argmax(dim=-1)
            right += int((predicted == tokens[:, distance + 1 :]).sum())
        by_distance[int(distance)] = right / (num_sequences * (string_length - 1))
    model.train(training)
    return {
        "accuracy": sum(by_distance.values()) / len(by_distance),
        "chance": 1.0 / (vocab_size - len(set(reserved))),
        "tokens": num_sequences * (string_length - 1),
        "by_distance": by_distance,
    }
