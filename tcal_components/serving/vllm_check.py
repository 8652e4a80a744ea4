"""An export in vLLM against transformers: log-probabilities, token by token.

    python -m tcal_components.serving.vllm_check runs/a/export --text text.jsonl --output check.json

vLLM reads a text and continues pieces of it, then transformers scores the same tokens. Texts are not compared, which a tie
would part: the log-probabilities of the text show the prefill, those of the continuations the single steps. What bfloat16
alone costs transformers is the yardstick. Needs vLLM and a GPU, and of this project this package alone.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tcal_components.serving.vllm_engine import add_arguments, machine, start

# The mean difference to transformers in float32 may be this multiple of what bfloat16 costs transformers itself.
TOLERANCE = 3.0


def main(arguments: Sequence[str] | None = None) -> None:
    """The command (see the module's text)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--text", help=".txt or .jsonl with a key text")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of the text that are compared")
    parser.add_argument("--continuations", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=200, help="tokens of a continuation's prompt")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--score", help=argparse.SUPPRESS)  # the half that transformers computes, in its own process
    options = parser.parse_args(arguments)
    if options.score:
        _score(options)
    elif options.text is None:
        parser.error("--text is needed")
    else:
        _check(options)


def _check(options: argparse.Namespace) -> None:
    ids = _token_ids(options.folder, options.text)
    length, count = options.tokens, options.continuations
    starts = [length + options.prompt * n for n in range(count)]
    if len(ids) < starts[-1] + options.prompt:
        sys.exit(f"error: {options.text} has {len(ids)} tokens, {starts[-1] + options.prompt} are needed")
    text, prompts = ids[:length], [ids[start : start + options.prompt] for start in starts]
    measured = _ask(options, text, prompts)
    # A process of its own: the engine's memory is free by then.
    between, scored = Path(options.output).with_suffix(".vllm.json"), Path(options.output).with_suffix(".hf.json")
    between.write_text(json.dumps(measured))
    score = [sys.executable, "-m", "tcal_components.serving.vllm_check", options.folder, "--output", str(scored)]
    subprocess.run([*score, "--score", str(between)], check=True)
    reference = json.loads(scored.read_text())
    result = machine() | {"folder": Path(options.folder).name, "eager": options.eager}
    result |= compare(measured, reference)
    between.unlink()
    scored.unlink()
    Path(options.output).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    sys.exit(not result["ok"])


def _ask(options: argparse.Namespace, text: list[int], prompts: list[list[int]]) -> dict[str, Any]:
    """Tokens and log-probabilities of vLLM; the engine ends with this function."""
    from vllm import SamplingParams

    longest = max(len(text), options.prompt + options.new_tokens)
    llm = start(options, max_model_len=longest + 8, max_num_seqs=max(len(prompts), 2))

    def generate(prompts: list[list[int]], **settings: Any) -> Any:
        asked = SamplingParams(temperature=0.0, **settings)
        return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked, use_tqdm=False)

    (read,) = generate([text], max_tokens=1, prompt_logprobs=0)
    written = [out.outputs[0] for out in generate(prompts, max_tokens=options.new_tokens, ignore_eos=True, logprobs=0)]
    return {
        "text": text,
        "text_logprobs": _of_tokens(read.prompt_logprobs[1:], text[1:]),
        "prompts": prompts,
        "written": [list(out.token_ids) for out in written],
        "written_logprobs": [_of_tokens(out.logprobs, out.token_ids) for out in written],
    }


def _of_tokens(steps: Sequence[Any], tokens: Sequence[int]) -> list[float]:
    return [float(step[token].logprob) for step, token in zip(steps, tokens)]


def compare(measured: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """Puts log-probabilities of vLLM beside those of transformers.

    Args:
        measured: Of vLLM: ``text_logprobs`` [T], ``written_logprobs`` [N, M].
        reference: The same of transformers by type, and ``greedy`` [N, M]: how much less likely a written token is than
            the likeliest, 0 where it is that.

    Returns:
        dict[str, Any]: For ``prefill`` and ``decode`` mean and largest difference to float32 (``vllm``; ``bfloat16``:
        transformers'), ``perplexity`` of each, ``greedy_equal`` (share of written tokens that are the likeliest in
        float32), ``worst_choice`` (the largest of ``greedy``), ``problems`` and ``ok``.
    """
    exact, rounded = reference["float32"], reference["bfloat16"]

    def flat(values: dict[str, Any], key: str) -> list[float]:
        return values[key] if key == "text_logprobs" else [x for row in values[key] for x in row]

    result: dict[str, Any] = {"problems": []}
    for name, key in (("prefill", "text_logprobs"), ("decode", "written_logprobs")):
        rows: dict[str, dict[str, float]] = {}
        for who, values in (("vllm", measured), ("bfloat16", rounded)):
            apart = [abs(a - b) for a, b in zip(flat(values, key), flat(exact, key), strict=True)]
            rows[who] = {"mean": sum(apart) / len(apart), "max": max(apart)}
        result[name] = rows
        if not rows["vllm"]["mean"] <= TOLERANCE * rows["bfloat16"]["mean"] + 1e-3:  # NaN fails too
            result["problems"].append(
                f"{name}: log-probabilities are off by {rows['vllm']['mean']:.3g} on average, bfloat16 in transformers by "
                f"{rows['bfloat16']['mean']:.3g}"
            )
    greedy = [gap for row in exact["greedy"] for gap in row]
    result["greedy_equal"] = sum(gap == 0 for gap in greedy) / len(greedy)
    result["worst_choice"] = max(greedy)
    result["perplexity"] = {
        who: math.exp(-sum(values["text_logprobs"]) / len(values["text_logprobs"]))
        for who, values in (("vllm", measured), ("bfloat16", rounded), ("float32", exact))
    }
    return result | {"ok": not result["problems"]}


def _score(options: argparse.Namespace) -> None:
    """Log-probabilities in transformers, of the tokens in a file of :func:`_ask`."""
    import torch
    from transformers import AutoModelForCausalLM

    measured = json.loads(Path(options.score).read_text())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    result = {}
    for dtype in (torch.bfloat16, torch.float32):
        model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=dtype).eval().to(device)

        def logprobs(tokens: list[int], count: int, model: Any = model) -> tuple[list[float], list[float]]:
            """Of the last ``count`` tokens, and how far each is from the likeliest."""
            given = torch.tensor([tokens], device=device)
            with torch.inference_mode():
                found = model(given, use_cache=False).logits[0, -count - 1 : -1].float().log_softmax(-1)
            chosen = found.gather(1, given[0, -count:, None])[:, 0]
            return chosen.tolist(), (found.amax(-1) - chosen).tolist()

        rows = [logprobs(p + w, len(w)) for p, w in zip(measured["prompts"], measured["written"])]
        result[str(dtype).removeprefix("torch.")] = {
            "text_logprobs": logprobs(measured["text"], len(measured["text"]) - 1)[0],
            "written_logprobs": [row[0] for row in rows],
            "greedy": [row[1] for row in rows],
        }
        del model
    Path(options.output).write_text(json.dumps(result))


def _token_ids(folder: str, path: str) -> list[int]:
    from transformers import AutoTokenizer

    text = Path(path).read_text(encoding="utf-8")
    if path.endswith(".jsonl"):
        text = "\n\n".join(json.loads(line)["text"] for line in text.splitlines() if line.strip())
    return AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"]


if __name__ == "__main__":
    main()
