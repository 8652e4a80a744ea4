"""Checks an export by loading it with stock transformers and comparing it with the student."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from tcal_components.checkpoint.optimizer_state import clean_name
from tcal_components.checkpoint.teacher import locate_tensors, open_safetensors
from tcal_components.export.config_json import CUSTOM_FORMAT, DTYPES
from tcal_components.export.import_hybrid import read_exported_folder
from tcal_components.export.layout import HybridLayout
from tcal_components.export.stock_model import cache_of, load_stock_model, quiet_transformers, usable_kernels
from tcal_components.export.weights import WeightExporter, rounded_parameter
from tcal_components.modules.hybrid_decoder import HybridDecoder

# Allowed difference of logits, relative to the largest logit, both sides computing in float32. Measured differences are
# near 1e-6 on a CPU. On CUDA the kernels of flash-linear-attention solve a triangular system in TF32 (10 bits).
RELATIVE_TOLERANCE = {"cpu": 1e-4, "cuda": 2e-3}
Reference = Callable[[torch.Tensor], torch.Tensor]
PROBE_TEXT = "Hybrid models: 12 345 tokens,\n\tif x != 'y': naïve_café() -> 東京 🙂"


class ExportError(RuntimeError):
    """An export that does not compute what the student computes."""


def verify_export(
    output_dir: str | Path,
    student: HybridDecoder,
    tokens: torch.Tensor,
    *,
    pad_id: int | None = None,
    max_new_tokens: int = 8,
    relative_tolerance: float | None = None,
    strict: bool = True,
    keep_student: bool = True,
) -> dict[str, Any]:
    """Loads an export with ``AutoModelForCausalLM`` and compares it with the student.

    Both sides compute in float32 on the student's device. For a bfloat16 export the student's weights are first rounded
    as the export rounds them (A_log and dt_bias stay float32), so what remains is float32 rounding in either case.

    Args:
        output_dir: The exported folder.
        student: The hybrid that was exported, whole on one device, without caches.
        tokens: Token ids [B, T], T at least 8, on any device; real text shows more than random ids.
        pad_id: Token for left padding. Default: None, the first id of ``tokens``.
        max_new_tokens: Length of the greedy continuation. Default: 8.
        relative_tolerance: Allowed difference relative to the largest logit. Default: None, ``RELATIVE_TOLERANCE``
            of the device.
        strict: Whether a failed check raises. Default: True.
        keep_student: Whether the student has its own weights again afterwards; they wait in host memory meanwhile.
            False leaves it with the rounded ones. Default: True.

    Returns:
        dict[str, Any]: ``max_abs_logit_diff`` (full forward), ``cached_max_abs_diff`` (prefill, then token by token;
        None where all or no layers keep attention, for which transformers has no cache), ``left_padded_max_abs_diff``
        (a batch of unequal lengths with mask), ``greedy_equal`` (``generate`` against the student's arg max; a
        difference between logits closer than the tolerance does not count), ``weights_equal`` (the files against the
        student, bit for bit), ``tokenizer_equal`` (None without tokenizer.json), ``reference_logit_max``,
        ``tolerance``, ``relative_tolerance``, ``compared`` (in words), ``problems`` and ``ok``.

    Raises:
        ExportError: If ``strict`` and the export is not the student.
        ValueError: For tokens or a student that cannot be compared.
    """
    folder = Path(output_dir)
    layout, format, dtype = read_exported_folder(folder)
    _check_arguments(student, tokens, layout)
    device = student.tok_embeddings.weight.device
    tokens = tokens.to(device)
    pad = int(tokens[0, 0]) if pad_id is None else pad_id
    if relative_tolerance is None:
        relative_tolerance = RELATIVE_TOLERANCE.get(device.type, RELATIVE_TOLERANCE["cuda"])

    changed = _changed_tensor(folder, student, layout, dtype)  # before the student is rounded
    with (
        _evaluation(student),
        quiet_transformers(),
        torch.no_grad(),
        tqdm(total=6, desc="check the export", unit="check") as bar,
        _rounded(student, layout, dtype, keep=keep_student) as reference,
    ):
        expected = reference(tokens)
        scale = float(expected.abs().max())
        tolerance = relative_tolerance * max(scale, 1.0)
        model, problems = load_stock_model(folder, trust_remote_code=format == CUSTOM_FORMAT)
        model = model.to(device).eval()
        bar.update(2)  # the files, and that they load
        checks: dict[str, Callable[[], Any]] = {
            "max_abs_logit_diff": lambda: _difference(model(input_ids=tokens, use_cache=False).logits, expected),
            "cached_max_abs_diff": lambda: (
                _difference(_cached_logits(model, tokens), expected) if model.config.use_cache else None
            ),
            "left_padded_max_abs_diff": lambda: _left_padded_difference(model, reference, tokens, pad),
            "greedy_equal": lambda: _greedy_equal(model, reference, tokens[:1], pad, max_new_tokens, 2.0 * tolerance),
        }
        result: dict[str, Any] = {}
        with usable_kernels(model, device):
            for name, check in checks.items():
                result[name] = check()
                bar.update()
    result["weights_equal"] = changed is None
    result["tokenizer_equal"] = _tokenizer_equal(folder, format == CUSTOM_FORMAT)

    for name in ("max_abs_logit_diff", "cached_max_abs_diff", "left_padded_max_abs_diff"):
        if result[name] is not None and not result[name] <= tolerance:  # NaN fails too
            problems.append(f"{name} is {result[name]:.3g}")
    if not result["greedy_equal"]:
        problems.append("greedy text differs")
    if not result["weights_equal"]:
        problems.append(f"{changed} differs from the student's weights")
    if result["tokenizer_equal"] is False:
        problems.append("AutoTokenizer splits text otherwise than tokenizer.json")
    result |= {
        "reference_logit_max": scale,
        "tolerance": tolerance,
        "relative_tolerance": relative_tolerance,
        "compared": "float32 computation on both sides"
        + ("" if dtype == torch.float32 else f", student weights rounded to {DTYPES[dtype]} as in the export"),
        "problems": problems,
        "ok": not problems,
    }
    if strict and problems:
        raise ExportError(
            f"the export in {folder} does not reproduce the student: {'; '.join(problems)} "
            f"(tolerance {tolerance:.3g} at logits up to {scale:.3g})"
        )
    return result


@contextlib.contextmanager
def _rounded(student: HybridDecoder, layout: HybridLayout, dtype: torch.dtype, *, keep: bool) -> Iterator[Reference]:
    """The student with the weights that the export has, as a function from token ids [B, T] to float32 logits [B, T, V].

    Its own weights wait in host memory meanwhile (or are dropped): three float32 copies of a large model do not fit on
    one GPU.
    """
    originals: list[tuple[torch.nn.Parameter, torch.Tensor]] = []

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast(tokens.device.type, enabled=False):
            return student(tokens).float()

    try:
        for name, parameter in student.named_parameters():
            rounded = rounded_parameter(clean_name(name), parameter, layout=layout, dtype=dtype)
            if keep:
                originals.append((parameter, parameter.data.cpu()))
            parameter.data = rounded
        yield logits
    finally:
        for parameter, original in originals:
            parameter.data = original.to(parameter.device)


def _check_arguments(student: HybridDecoder, tokens: torch.Tensor, layout: HybridLayout) -> None:
    if tokens.ndim != 2 or tokens.shape[1] < 8:
        raise ValueError(
            f"tokens have shape {tuple(tokens.shape)}; the check needs [batch, length] of length 8 or more"
        )
    if int(tokens.max()) >= layout.spec.vocab_size or int(tokens.min()) < 0:
        raise ValueError(f"tokens reach {int(tokens.max())}; the vocabulary has {layout.spec.vocab_size} entries")
    if student.caches_are_setup():
        raise ValueError("the student has caches set up; verify a model without them")
    if student.retained_layers != layout.retained_layers:
        raise ValueError(
            f"the export keeps attention in layers {list(layout.retained_layers)}, the student in "
            f"{student.retained_layers}"
        )
    for index in student.converted_layers:
        eps = student.layers[index].attn.o_norm.eps
        if eps != layout.spec.norm_eps:
            raise ValueError(
                f"layers.{index}.attn.o_norm has eps {eps}; an export has one eps for all norms, {layout.spec.norm_eps}"
            )


@contextlib.contextmanager
def _evaluation(student: HybridDecoder) -> Iterator[None]:
    was_training = student.training
    student.eval()
    try:
        yield
    finally:
        student.train(was_training)


def _difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return float((logits.float() - expected).abs().max())


def _cached_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [B, T, V] of a prefill of half the tokens and one step for each of the others."""
    half = tokens.shape[1] // 2
    out = model(input_ids=tokens[:, :half], use_cache=True)
    logits = [out.logits]
    for position in range(half, tokens.shape[1]):
        out = model(input_ids=tokens[:, position : position + 1], use_cache=True, **cache_of(out))
        logits.append(out.logits)
    return torch.cat(logits, dim=1)


def _left_padded_difference(model: Any, reference: Reference, tokens: torch.Tensor, pad: int) -> float:
    """Compares a left-padded batch of two lengths with the student on each row alone."""
    length = tokens.shape[1]
    rows = [tokens[0], tokens[-1, : length // 2]]
    batch = tokens.new_full((2, length), pad)
    mask = torch.zeros_like(batch)
    for number, row in enumerate(rows):
        batch[number, length - len(row) :] = row
        mask[number, length - len(row) :] = 1
    logits = model(input_ids=batch, attention_mask=mask, use_cache=False).logits
    return max(_difference(logits[n, length - len(row) :], reference(row[None])[0]) for n, row in enumerate(rows))


def _greedy_equal(
    model: Any, reference: Reference, prompt: torch.Tensor, pad: int, max_new_tokens: int, tie: float
) -> bool:
    """Compares greedy ``generate`` with the student; after a tie (top logits closer than ``tie``) it stops."""
    from transformers import GenerationConfig

    prompt = prompt[:, : prompt.shape[1] // 2]
    # Not the folder's: its sampling settings or end-of-text would end the comparison early.
    model.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=pad, use_cache=model.config.use_cache
    )
    generated = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt))
    for position in range(prompt.shape[1], generated.shape[1]):
        last = reference(generated[:, :position])[0, -1]
        best, chosen = last.max(), last[generated[0, position]]
        if chosen < best:
            return bool(best - chosen <= tie)
    return generated.shape[1] == prompt.shape[1] + max_new_tokens


def _changed_tensor(folder: Path, student: HybridDecoder, layout: HybridLayout, dtype: torch.dtype) -> str | None:
    """Returns the name of a stored tensor that is not what the student exports to, or None."""
    location = locate_tensors(folder)
    files = {path: open_safetensors(path) for path in set(location.values())}
    weights = {clean_name(name): value for name, value in student.named_parameters()}
    for name, tensor in WeightExporter(weights, layout=layout, dtype=dtype).tensors():
        if name not in location or not torch.equal(files[location[name]].get_tensor(name), tensor):
            return name
    return None


def _tokenizer_equal(folder: Path, trust_remote_code: bool) -> bool | None:
    """Compares AutoTokenizer, which picks a class by model type, with the rules in tokenizer.json."""
    if not (folder / "tokenizer.json").is_file():
        return None
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    # It asks before it reads a config with remote code.
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    ids = tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"]
    return ids == Tokenizer.from_file(str(folder / "tokenizer.json")).encode(PROBE_TEXT, add_special_tokens=False).ids
