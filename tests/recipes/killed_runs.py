"""Kills runs of the main recipe, lets them go on, and compares what they end with.

    python -m tests.recipes.killed_runs --trials 100
    python -m tests.recipes.killed_runs --trials 20 --processes 2
    python -m tests.recipes.killed_runs --writes

The first kills at random moments, of 100 times at least 15 in each stage (or asks to stop, one time in five); the second one
of two processes, and the other has to end too; the third once before each different write of a run: each flush, each file
that takes its name, each folder that is made or goes. All compare every tensor and every number of the report, bit for bit,
with a run that was left alone, print one JSON object, and end with status 1 on a difference.

``--serve`` is for the tests: it reads the arguments of :func:`follow` from stdin, one JSON object a line, and writes what it
returns.

Runs are forked from a process that has imported everything, so a start takes no time. This process itself computes nothing:
autograd's threads would not survive a fork.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import importlib.util
import itertools
import json
import os
import random
import re
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tcal_components.assets import asset_path
from tcal_components.checkpoint.run_state import RunState
from tcal_components.config import STAGES
from tcal_components.distributed.preemption import SIGNALS
from tcal_components.reporting import package_versions
from tcal_components.reporting.report import load_report

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "taylor_calibrate_kd.py"

JOINT = ("align.joint.steps=6", "align.joint.batch_size=4", "align.joint.seq_len=64", "align.joint.eval_every=3")
RUN = (*STAGES[:-1], "generate", "export")  # in this order
OUTPUTS = dict(zip(STAGES, ("statistics", "mixers", "mixers", "student", "model"), strict=True))
OUTPUTS = {stage: f"{name}.safetensors" for stage, name in OUTPUTS.items()}
# What two runs differ in: how long they took, and how much memory of the machine they had.
MEASURED = ("seconds", "tokens_per_second", "peak_memory_gib")
WRITES = ("replace", "rename", "unlink", "mkdir", "rmdir", "fsync")

Stop = list[Any]
Writes = tuple[set[str], str]


def short_texts(folder: Path) -> Path:
    """Writes calibration.jsonl, train.jsonl and eval.jsonl: short, different documents of the embedded text."""
    for name, count in (("calibration", 14), ("train", 40), ("eval", 8)):
        lines = (asset_path("quickstart") / f"{name}.jsonl").read_text().splitlines()
        documents = (json.loads(line)["text"] for line in lines)
        pieces = (text[i : i + 1200] for text in documents for i in range(0, len(text) - 1200, 1200))
        rows = [json.dumps({"text": piece}) for piece in itertools.islice(pieces, count)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def short_run(texts: Path, output: Path, *changes: str) -> list[str]:
    """Command line of a run of all stages on the embedded teacher in a few seconds."""
    args = [f"output_dir={output}", "align.steps=8", "align.batch_size=4", "align.seq_len=64"]
    parts = {"calibration_dataset": "calibration", "dataset": "train", "validation_dataset": "eval"}
    for part, source in parts.items():
        args += [f"{part}.source={texts / source}.jsonl", f"{part}.seq_len=64", f"{part}.max_tokens=2048"]
    args += ["dataset.max_tokens=8192", "align.eval_every=4", "align.heldout_batches=2", "align.refit_tokens=1024"]
    args += ["measure.batch_size=4", "distill.tokens=3072", "distill.batch_size=4", "distill.eval_every_steps=6"]
    args += ["distill.warmup_steps=2", "distill.lr=3.0e-4", "export.dtype=fp32", "export.verify_tokens=32"]
    return ["--config", str(RECIPE.parents[1] / "configs" / "quickstart.yaml"), *args, *map(str, changes)]


def load_recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("recipe", RECIPE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["recipe"] = module
    spec.loader.exec_module(module)
    return module


# ----------------------------------------------------------------------------------------------------------- one run


def tell(pipe: int, stage: str, run: Callable[[], None]) -> None:
    os.write(pipe, f"{stage}\n".encode())
    run()
    os.write(pipe, f"/{stage}\n".encode())


def die_before_a_new_write(output: Path, known: set[str], only: str, pipe: int) -> None:
    """Kills this process before the first write that is not among the known ones, having told it on the pipe."""

    def before(name: str, write: Callable[..., Any], *args: Any, **options: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{args[0]}") if isinstance(args[0], int) else os.fspath(args[0])
        if (folder := options.get("dir_fd")) is not None:
            path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
        if Path(path).is_relative_to(output):
            file = re.sub(r"(?<=writing-)\w+|\d{2,}", "N", str(Path(path).relative_to(output)))
            files = (f"{stage}/{name}" for stage in STAGES for name in (OUTPUTS[stage], "result.json"))
            last = [file for file in files if (output / file).is_file()][-1:]
            point = f"{name} {file} after {(last or ['nothing'])[0]}"
            if point not in known and re.search(only, point):
                os.write(pipe, f"write {point}\n".encode())
                os.kill(os.getpid(), signal.SIGKILL)
        return write(*args, **options)

    for name in WRITES:
        setattr(os, name, functools.partial(before, name, getattr(os, name)))


def child(module: ModuleType, args: list[str], pipe: int, log: Path, *, steps: bool, writes: Writes | None) -> None:
    """The recipe, which says on the pipe when a stage begins and ends, and each step if asked. Never returns."""
    code = 1
    atexit._clear()  # what follows is the end of an interpreter, of this run alone
    try:
        torch.set_num_threads(1)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background process ignores it
        with log.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        cfg = OmegaConf.merge(OmegaConf.load(args[1]), OmegaConf.from_dotlist(args[2:]))
        if writes is not None:
            die_before_a_new_write(Path(cfg.output_dir), *writes, pipe)
        with module.one_line_errors():
            recipe = module.TaylorCalibrateKD(cfg)
        for stage in RUN:
            setattr(recipe, stage, functools.partial(tell, pipe, stage, getattr(recipe, stage)))
        if steps:
            recipe._log_metrics = lambda values, step, prefix="": os.write(pipe, b"step\n")
        with module.one_line_ending():
            recipe.run()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:  # noqa: BLE001 (a child must never return into its parent's code)
        sys.excepthook(*sys.exc_info())
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def start(processes: int, **options: Any) -> tuple[list[int], int]:
    """Forks the processes of a run; returns their ids and what the first one writes to."""
    reading, writing = os.pipe()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = []
    for rank in range(processes):
        found.append(os.fork())
        if found[-1] == 0:
            os.close(reading)
            if processes > 1:
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes))
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            child(pipe=writing if rank == 0 else os.dup2(os.open(os.devnull, os.O_WRONLY), writing), **options)
    os.close(writing)
    return found, reading


def run(
    module: ModuleType,
    args: list[str],
    log: Path,
    stop: Stop | None = None,
    *,
    writes: Writes | None = None,
    processes: int = 1,
) -> dict[str, Any]:
    """One run.

    Args:
        module: the recipe.
        args: its command line.
        log: where it writes what it says.
        stop: [stage, seconds after its start or None for its first step, signal, which process or by default the first].
        writes: those before which it was killed already, and a pattern; it is killed before the first other one.
        processes: of the run.

    Returns:
        dict: ``status`` of each process, stage ``during`` which the first ended, ``seconds`` by finished stage, ``write``
        before which it was killed, and the seconds that all processes took to ``end`` after one got the signal.
    """
    stage, moment, number, whom = [*(stop or [None, 0, None]), 0][:4]
    ids, reading = start(processes, module=module, args=args, log=log, steps=moment is None, writes=writes)
    status: dict[int, int] = {}
    times: dict[str, float] = {}
    seconds: dict[str, float] = {}
    found: dict[str, Any] = {"write": None, "end": None}

    def strike() -> None:
        began = time.monotonic()
        os.kill(ids[whom], number)
        for other in ids[:whom] + ids[whom + 1 :]:  # which end because this one does
            status[other] = os.waitstatus_to_exitcode(os.waitpid(other, 0)[1])
        if number == signal.SIGSTOP:
            os.kill(ids[whom], signal.SIGKILL)
        status[ids[whom]] = os.waitstatus_to_exitcode(os.waitpid(ids[whom], 0)[1])
        found["end"] = time.monotonic() - began

    with os.fdopen(reading, buffering=1) as lines:
        for line in lines:
            word = line.strip()
            if word.startswith("write "):
                found["write"] = word.removeprefix("write ")
            elif word.startswith("/"):
                seconds[word[1:]] = time.monotonic() - times[word[1:]]
            elif word == "step":
                if moment is None and stage in times and stage not in seconds and not status:
                    strike()
            else:
                times[word] = time.monotonic()
                if word == stage and moment is not None:
                    select.select([lines], [], [], moment)  # not after the end of the stage
                    strike()
    for process in ids:
        if process not in status:
            status[process] = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    during = next((stage for stage in times if stage not in seconds), None)
    return {"status": [status[process] for process in ids], "during": during, "seconds": seconds, **found}


# ------------------------------------------------------------------------------------------------- what a run has left


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


def differences(first: Path, second: Path) -> list[str]:
    """In what two runs of the same config in the same place differ: files that are there, tensors, numbers of the report."""
    found = []
    names = [sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()) for out in (first, second)]
    names = [[name for name in listed if not name.startswith("logs/")] for listed in names]
    found += sorted(set(names[0]) ^ set(names[1]))
    for name in set(names[0]) & set(names[1]):
        if name.endswith(".safetensors"):
            one, other = load_file(first / name), load_file(second / name)
            found += [f"{name}: {key}" for key in one.keys() ^ other.keys()]
            found += [f"{name}: {key}" for key in one.keys() & other.keys() if not same(one[key], other[key])]
    reports = [numbers(json.loads((out / "report.json").read_text())) for out in (first, second)]
    found += [f"report.json: {key}" for key in reports[0].keys() | reports[1].keys() if different(*reports, key)]
    return found


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit: not as numbers, of which 0 and -0 are equal."""
    return one.dtype == other.dtype and one.shape == other.shape and one.numpy().tobytes() == other.numpy().tobytes()


def different(one: dict[str, Any], other: dict[str, Any], key: str) -> bool:
    return key not in one or key not in other or json.dumps(one[key]) != json.dumps(other[key])


def numbers(report: dict[str, Any]) -> dict[str, Any]:
    """Every number of a report by its path; of those that depend on the machine's day only whether they are there."""
    flat: dict[str, Any] = {}

    def walk(value: Any, path: str) -> None:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
        if items is None:
            flat[path] = value is not None if path.split(".")[0] in MEASURED else value
            return
        for key, item in items:
            walk(item, f"{path}.{key}" if path else str(key))

    walk(report, "")
    return flat


# ------------------------------------------------------------------------------------------------------- the commands


class Trials:
    """Broken runs beside one that is left alone.

    Args:
        folder: for all of it; the runs have the same ``output_dir`` one after the other, since it is in their reports.
        changes: of the config.
        processes: of each run.
    """

    def __init__(self, folder: Path, changes: Sequence[str] = (), processes: int = 1) -> None:
        self.module, self.processes = load_recipe(), processes
        self.whole, self.out, self.log = folder / "whole", folder / "out", folder / "runs.log"
        changes = ["resume_from_checkpoint=true", *JOINT, "save_every=2", "distill.save_every_steps=2", *changes]
        self.args = short_run(short_texts(folder), self.out, *changes)
        self.ended: list[dict[str, Any]] = []
        self.different: list[str] = []
        self.seconds = self.run()["seconds"]
        self.out.rename(self.whole)

    def run(self, stop: Stop | None = None, writes: Writes | None = None) -> dict[str, Any]:
        """One run, which has to end well or because it was killed."""
        ended = run(self.module, self.args, self.log, stop, writes=writes, processes=self.processes)
        if any(ended["status"]):
            if ended["write"] is None and (stop is None or ended["end"] is None):
                raise RuntimeError(f"a run ended with status {ended['status']}:\n{self.log.read_text()[-3000:]}")
            self.ended.append({"stop": stop, **ended})
        return ended

    def finish(self) -> None:
        """The last run in a folder, and the comparison."""
        self.run()
        self.different += differences(self.whole, self.out)
        shutil.rmtree(self.out)

    def by_stage(self) -> dict[str, int]:
        """Broken runs by the stage that they were in."""
        found = Counter(ended["during"] or "between" for ended in self.ended)
        return {stage: found[stage] for stage in (*RUN, "between")}


def at_random(trials: Trials, count: int, seed: int) -> dict[str, Any]:
    """Kills at random moments, several in each stage on the way of one run."""
    chance = random.Random(seed)
    least, reach = 15 * count // 100, dict.fromkeys(STAGES, 1.0)
    while len(trials.ended) < count or min(trials.by_stage()[stage] for stage in STAGES) < least:
        for stage in STAGES:
            during = stage
            while during == stage:  # until it was at its end
                number = chance.choice(SIGNALS) if chance.random() < 0.2 else signal.SIGKILL
                moment = chance.random() * trials.seconds[stage] * reach[stage]
                during = trials.run([stage, moment, number, chance.randrange(trials.processes)])["during"]
                # A run that continues has less before it, and the machine may be faster or slower now than it was.
                reach[stage] *= 1.15 if during == stage else 0.75
        trials.finish()
        print(f"{len(trials.ended)} kills, {trials.by_stage()}, {trials.different or 'equal'}", file=sys.stderr)
    signals = Counter(signal.Signals(ended["stop"][2]).name for ended in trials.ended)
    found = {"kills": len(trials.ended), "by_stage": trials.by_stage(), "signals": dict(signals.most_common())}
    if trials.processes > 1:
        found["slowest_end"] = round(max(ended["end"] for ended in trials.ended), 1)
    return found


def before_writes(trials: Trials, only: str = "") -> dict[str, Any]:
    """A kill before each write that is not like one before which an earlier run was killed, all on the way of one run."""
    known: set[str] = set()
    while (ended := trials.run(writes=(known, only)))["write"] is not None:
        known.add(ended["write"])
        print(f"{len(known)}: {ended['write']}", file=sys.stderr)
    trials.finish()
    return {"kills": len(known), "writes": sorted(known)}


def follow(
    args: list[str],
    output_dir: str,
    stops: list[Stop] | None = None,
    only: str | None = None,
    processes: int = 1,
    compare: str | None = None,
    last: bool = True,
) -> dict[str, Any]:
    """Runs for a test.

    Args:
        args: the recipe's command line.
        output_dir: in it.
        stops: one a run, see :func:`run`.
        only: a pattern of writes, before each of which a run is killed.
        processes: of each run.
        compare: folder of a run that was left alone.
        last: then one run is let end.

    Returns:
        dict: ``runs``, how each ended and what it left, and ``different``, see :func:`differences`.
    """
    module, output, runs = load_recipe(), Path(output_dir), []
    output.mkdir(parents=True, exist_ok=True)
    one = functools.partial(run, module, args, output.with_name(f"{output.name}.log"), processes=processes)
    for stop in stops or ():
        runs.append({"stop": stop, **one(stop), **readable(output)})
    known: set[str] = set()
    while only is not None and (ended := one(writes=(known, only)))["write"] is not None:
        known.add(ended["write"])
        runs.append({"stop": None, **ended})
    if last:
        runs.append({"stop": None, **one(), **readable(output)})
    return {"runs": runs, "different": [] if compare is None else differences(output, Path(compare))}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.recipes.killed_runs")
    parser.add_argument("--trials", type=int, help="kills at random moments")
    parser.add_argument("--writes", action="store_true", help="kill once before each different write")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--serve", action="store_true", help="follow plans of a test")
    given = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    if given.serve:
        for line in sys.stdin:
            print(json.dumps(follow(**json.loads(line))), flush=True)
        return 0
    if not given.trials and not given.writes:
        parser.error("nothing to do: --trials N or --writes")
    began = time.monotonic()
    found: dict[str, Any] = {"command": " ".join(["python -m tests.recipes.killed_runs", *argv])}
    with tempfile.TemporaryDirectory() as folder:
        trials = Trials(Path(folder).resolve(), processes=given.processes)
        if given.trials:
            found |= at_random(trials, given.trials, given.seed)
        if given.writes:
            found |= before_writes(trials)
    found |= {"equal": not trials.different, "different": trials.different}
    found |= {"seconds": round(time.monotonic() - began, 1), "hardware": f"{len(os.sched_getaffinity(0))} CPU cores"}
    found["versions"] = package_versions()
    text = json.dumps(found, indent=2) + "\n"
    print(text, end="")
    if given.output is not None:
        given.output.write_text(text)
    return 0 if found["equal"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
