"""Speed of an export in vLLM, beside its teacher's with the same settings.

    python -m tcal_components.serving.vllm_speed outlines/hybrid --dummy --output hybrid.json

Requests of one length are given together and timed until all have their first token; then steps of all of them. Speed does
not depend on weights: ``--dummy`` makes them up, so that a config is enough (``outline`` writes such folders). Needs vLLM and a GPU, and of this project this
package alone.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tcal_components.serving.vllm_engine import TOKENS_A_STEP, add_arguments, machine, read_config, start

# Batch x context.
POINTS = ("1x4096", "16x4096", "1x32768", "8x32768", "1x131072", "4x131072")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command (see the module's text)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--dummy", action="store_true", help="made-up weights")
    parser.add_argument("--points", nargs="+", default=list(POINTS))
    parser.add_argument("--steps", type=int, default=128, help="decoding steps of a measurement")
    parser.add_argument("--repeats", type=int, default=2, help="of the points up to 32768 tokens in all")
    options = parser.parse_args(arguments)
    _speed(options)


def _speed(options: argparse.Namespace) -> None:
    points = [tuple(int(number) for number in point.split("x")) for point in options.points]
    dummy = {"load_format": "dummy"} if options.dummy else {}
    began = time.perf_counter()
    llm = start(
        options,
        skip_tokenizer_init=True,
        max_model_len=max(context + _room(batch, context, options.steps) for batch, context in points),
        max_num_seqs=max(batch for batch, _ in points),
        **dummy,
    )
    result: dict[str, Any] = machine() | {"folder": Path(options.folder).name, "eager": options.eager}
    result |= {"start_seconds": time.perf_counter() - began, "points": {}}
    vocabulary = read_config(options.folder)["vocab_size"]
    _measure(llm, 1, 2048, 16, vocabulary)  # what compiles at the first use
    for batch, context in points:
        _measure(llm, batch, 256, 16, vocabulary)
        repeats = options.repeats if batch * context <= 32768 else 1
        rows = [_measure(llm, batch, context, options.steps, vocabulary) for _ in range(repeats)]
        best = max(rows, key=lambda row: row["decode_tokens_per_second"])
        best["prefill_tokens_per_second"] = max(row["prefill_tokens_per_second"] for row in rows)
        result["points"][f"{batch}x{context}"] = best | {"repeats": repeats}
        print(f"{options.folder} {batch} x {context}: {best}", flush=True)
        Path(options.output).write_text(json.dumps(result, indent=1) + "\n")  # after each, in case it is the last


def _measure(llm: Any, batch: int, context: int, steps: int, vocabulary: int) -> dict[str, float]:
    """Times ``batch`` requests of ``context`` random tokens each: until all have a token, then ``steps`` more of all."""
    from vllm import SamplingParams

    engine, numbers = llm.llm_engine, random.Random(context)
    # None may end before the last is read: the first ones decode meanwhile.
    asked = SamplingParams(temperature=0.0, max_tokens=_room(batch, context, steps), ignore_eos=True, detokenize=False)
    prompts = [[numbers.randrange(vocabulary) for _ in range(context)] for _ in range(batch)]
    names = [f"{time.monotonic_ns()}-{n}" for n in range(batch)]
    begin = time.perf_counter()
    for name, prompt in zip(names, prompts):
        engine.add_request(name, {"prompt_token_ids": prompt}, asked)
    written = dict.fromkeys(names, 0)
    while not all(written.values()):
        _step(engine, written)
    read, first = time.perf_counter(), dict(written)
    while any(written[name] < first[name] + steps for name in names):
        _step(engine, written)
    end = time.perf_counter()
    engine.abort_request(names)
    return {
        "prefill_tokens_per_second": batch * context / (read - begin),
        "decode_tokens_per_second": (sum(written.values()) - sum(first.values())) / (end - read),
    }


def _room(batch: int, context: int, steps: int) -> int:
    """Tokens that a request may write: ``steps``, and one for each part of a prompt that is read after its own."""
    return steps + 2 * (batch * context // TOKENS_A_STEP + batch) + 8


def _step(engine: Any, written: dict[str, int]) -> None:
    for out in engine.step():
        written[out.request_id] = len(out.outputs[0].token_ids)
    if not engine.has_unfinished_requests():
        sys.exit(f"error: requests ended early, with {sorted(written.values())} tokens")


if __name__ == "__main__":
    main()
