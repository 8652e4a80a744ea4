"""Runs the main recipe again and again in child processes and kills them: ``python killed_runs.py PLAN.json``.

The plan has ``args`` (the recipe's command line), ``output_dir``, ``stops``: [stage, seconds after its start, signal], one a
run, and then lets one run end. None for the seconds waits for the first step of the stage instead. The result, one JSON object on stdout, says how each run ended and what it left.

Children are forked from a process that has imported everything, so a start takes no time. This process itself computes
nothing: autograd's threads would not survive a fork.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import select
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors import safe_open
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tcal_components.checkpoint.run_state import RunState
from tcal_components.config import STAGES
from tcal_components.reporting.report import load_report

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "taylor_calibrate_kd.py"


def load_recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("recipe", RECIPE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["recipe"] = module
    spec.loader.exec_module(module)
    return module


def tell(pipe: int, stage: str, run: Callable[[], None]) -> None:
    os.write(pipe, f"{stage}\n".encode())
    run()
    os.write(pipe, f"/{stage}\n".encode())


def child(module: ModuleType, args: list[str], started: int, log: Path, *, steps: bool) -> None:
    """The recipe, which says on the pipe ``started`` when a stage begins and ends, and each step if asked. Never returns."""
    code = 1
    try:
        with log.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        cfg = OmegaConf.merge(OmegaConf.load(args[1]), OmegaConf.from_dotlist(args[2:]))
        recipe = module.TaylorCalibrateKD(cfg)
        for stage in STAGES:
            setattr(recipe, stage, functools.partial(tell, started, stage, getattr(recipe, stage)))
        if steps:
            recipe._log_metrics = lambda values, step: os.write(started, b"step\n")
        recipe.run()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:  # noqa: BLE001 (a child must never return into its parent's code)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(module: ModuleType, args: list[str], log: Path, stop: list[Any] | None) -> dict[str, Any]:
    """One run; ``stop`` is [stage, seconds or None, signal]."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reading)
        child(module, args, writing, log, steps=stop is not None and stop[1] is None)
    os.close(writing)
    times: dict[str, float] = {}
    seconds: dict[str, float] = {}
    with os.fdopen(reading, buffering=1) as lines:
        for line in lines:
            stage = line.strip()
            if stage.startswith("/"):
                seconds[stage[1:]] = time.monotonic() - times[stage[1:]]
                continue
            if stage == "step":
                if stop is not None and stop[1] is None and stop[0] in times and stop[0] not in seconds:
                    os.kill(process, stop[2])
                    stop = None
                continue
            times[stage] = time.monotonic()
            if stop is not None and stage == stop[0] and stop[1] is not None:
                select.select([lines], [], [], stop[1])  # not after the end of the stage
                os.kill(process, stop[2])
        _, status = os.waitpid(process, 0)
    during = next((stage for stage in times if stage not in seconds), None)
    return {"status": os.waitstatus_to_exitcode(status), "during": during, "seconds": seconds}


def readable(output: Path) -> dict[str, Any]:
    """Reads everything that has a name: weights, checkpoints, the report. A hidden name is not yet there."""
    found: dict[str, Any] = {"report": load_report(output / "report.json")["stages"], "files": [], "steps": {}}
    for path in sorted(output.rglob("*.safetensors")):
        if any(part.startswith(".") for part in path.relative_to(output).parts):
            continue
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                assert torch.isfinite(file.get_tensor(name).float()).all(), (path, name)
        found["files"].append(str(path.relative_to(output)))
    for stage in ("align", "distill"):
        state = RunState(output / stage / "state")
        for step in state.steps():
            entries = FileSystemReader(state.directory / f"step-{step:08d}").read_metadata().state_dict_metadata
            state.load(
                {
                    name: torch.empty(entry.size, dtype=entry.properties.dtype)
                    for name, entry in entries.items()
                    if isinstance(entry, TensorStorageMetadata)
                },
                step,
            )
        found["steps"][stage] = state.steps()
    return found


def main(plan: dict[str, Any]) -> dict[str, Any]:
    module, output = load_recipe(), Path(plan["output_dir"])
    output.mkdir(parents=True, exist_ok=True)
    runs = []
    for stop in [*plan["stops"], None]:
        runs.append({"stop": stop, **run(module, plan["args"], output / "runs.log", stop)})
        runs[-1] |= readable(output)
    return {"runs": runs}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
