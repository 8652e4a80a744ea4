"""Recovery by distillation from several starts, each over a grid: how many tokens until the teacher's perplexity is near."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from omegaconf import OmegaConf
from torch import Tensor
from torchtune import training

from tcal_components.ablation.comparison import fewer_tokens, lower_envelope, tokens_to_ratios
from tcal_components.checkpoint.artifacts import read_tensors
from tcal_components.checkpoint.fingerprint import fingerprint
from tcal_components.checkpoint.run_state import RunState
from tcal_components.config import (
    ConfigError,
    Count,
    Positive,
    Range,
    Rate,
    Settings,
    Tokens,
    WarmUp,
    check_keys,
    section,
)
from tcal_components.distill.config import DistillConfig, DistillResult
from tcal_components.distill.gradient import NonFiniteLossError
from tcal_components.distill.loop import distill
from tcal_components.distill.loss import build_loss
from tcal_components.distributed.preemption import stop_on_signals
from tcal_components.evaluation.load import free
from tcal_components.modules.conversion import student_state_dict
from tcal_components.modules.hybrid_decoder import HybridDecoder
from tcal_components.reporting import write_json
from tcal_components.setup import Workbench

# What tells the runs of one start's recovery apart.
GRID = ("lr", "base_lr", "tokens", "batch_size")
Rates = Annotated[list[Rate], Range(1, 100)]
TokenGrid = Tokens | Annotated[list[Tokens], Range(1, 100)]
BatchGrid = Count | Annotated[list[Count], Range(1, 100)]


@dataclasses.dataclass(frozen=True)
class RecoveryConfig(Settings):
    """Section ``recovery``: distillation from some of the cells, each over a grid.

    The grid is the product of ``lr``, ``base_lr``, ``tokens`` and ``batch_size``, the same for every start unless ``grids``
    has values of its own for it.

    Args:
        starts: ``START/ALIGNMENT`` of the cells, of the first seed.
        grids: by ``START/ALIGNMENT``, other values of any of ``tokens``, ``batch_size``, ``lr`` and ``base_lr``. A start that
            needs more tokens wants a longer schedule and other learning rates to be at its best.
        tokens: of a distillation, which is the length of its schedule; one number or a grid.
        batch_size: sequences a step over all processes, one number or a grid; their length is that of ``dataset``.
        micro_batch_size: sequences a forward pass of one process; None, or more than its share, takes all.
        lr: grid of peak learning rates of the converted layers.
        base_lr: grid of peak learning rates of everything else.
        warmup_steps: linear warm-up.
        eval_every_tokens: how often the perplexity is measured; also at an eighth, a quarter and a half of it.
        save_every_tokens: how often the state is saved that an interrupted run continues from; None never.
        ratios: of the teacher's perplexity, to which the tokens are counted.
        baseline: the one of ``starts`` that the tokens of the others are compared with; None takes the first.
    """

    starts: Annotated[list[str], Range(1)]
    tokens: TokenGrid
    batch_size: BatchGrid = 8
    micro_batch_size: Count | None = None
    lr: Rates = dataclasses.field(default_factory=lambda: [1e-3])
    base_lr: Rates = dataclasses.field(default_factory=lambda: [1e-4])
    warmup_steps: WarmUp = 10
    eval_every_tokens: Tokens = 131_072
    save_every_tokens: Tokens | None = None
    ratios: list[Positive] = dataclasses.field(default_factory=lambda: [1.5, 1.2, 1.1, 1.05])
    baseline: str | None = None
    grids: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _Grid(Settings):
    """One of ``recovery.grids``; None takes the section's own."""

    tokens: TokenGrid | None = None
    batch_size: BatchGrid | None = None
    lr: Rates | None = None
    base_lr: Rates | None = None


class Recovery:
    """The distillations of the grids, each finished one a file in ``directory``; started again, the missing ones are made.

    Runs that an earlier grid left in the same folder count too, so that a grid can be refined start by start.

    Args:
        config: the section.
        bench: config, text and processes of the recipe; its config has ``model`` and may have ``kd_loss`` and ``optimizer``.
        directory: of the runs, and of the weights that they start from (:meth:`weights_path`).
        cells: names ``START/ALIGNMENT`` that ``starts`` may hold.
        seed: of the distillations.

    Raises:
        ConfigError: a value that is not allowed.
    """

    def __init__(
        self, config: RecoveryConfig, *, bench: Workbench, directory: Path, cells: list[str], seed: int
    ) -> None:
        self.config, self.bench, self.directory, self.seed = config, bench, directory, seed
        self._check(cells)
        self.loss = build_loss(bench.cfg.get("kd_loss"))
        own = {name: section(_Grid, grid, f"recovery.grids.{name}") for name, grid in config.grids.items()}
        self.grids = {}
        for name in config.starts:
            try:
                self.grids[name] = self._grid(own.get(name))
            except ConfigError as error:  # `recovery.lr` of a start's own grid
                mine = f"recovery.grids.{name}: " if name in own else ""
                raise ConfigError(f"{mine}{error}") from error

    def _grid(self, own: _Grid | None) -> list[DistillConfig]:
        """Every distillation of one start."""
        given = {key: getattr(own, key, None) for key in GRID}
        values = [_as_list(getattr(self.config, key) if given[key] is None else given[key]) for key in GRID]
        for batch_size in dict(zip(GRID, values))["batch_size"]:
            self.bench.check_batch_size(batch_size, "recovery.batch_size")
        return [self._distill_config(**dict(zip(GRID, point))) for point in itertools.product(*values)]

    def _check(self, cells: list[str]) -> None:
        config = self.config
        check_keys(config.starts, cells, "recovery.starts")
        check_keys(config.grids, cells, "recovery.grids")
        if config.baseline is not None and config.baseline not in config.starts:
            raise ConfigError(
                f"recovery.baseline is {config.baseline!r}, expected one of recovery.starts: {', '.join(config.starts)}"
            )

    def _distill_config(self, *, lr: float, base_lr: float, tokens: int, batch_size: int) -> DistillConfig:
        config, seq_len = self.config, self.bench.data["training"].seq_len
        a_step, save = batch_size * seq_len, config.save_every_tokens
        given = {
            "tokens": tokens,
            "batch_size": batch_size,
            "lr": lr,
            "base_lr": base_lr,
            "micro_batch_size": config.micro_batch_size,
            "warmup_steps": config.warmup_steps,
            "eval_every_steps": max(1, round(config.eval_every_tokens / a_step)),
            "save_every_steps": None if save is None else max(1, round(save / a_step)),
        }
        own = {"seq_len": seq_len, "optimizer": self.bench.cfg.get("optimizer"), "seed": self.seed}
        return section(DistillConfig, given, "recovery", **own)

    def weights_path(self, start: str, alignment: str) -> Path:
        """Where the mixers lie that a distillation starts from."""
        return self.directory / f"{start}.{alignment}.safetensors"

    def run(
        self,
        cells: Mapping[str, Mapping[str, Any]],
        *,
        teacher: HybridDecoder,
        teacher_perplexity: float,
        write: Callable[[dict[str, Any], dict[str, Any]], None],
    ) -> None:
        """Distils from each start over the whole of its grid.

        Args:
            cells: by name, of the first seed: ``start``, ``alignment``, ``tokens``, ``perplexity`` and ``fingerprint``.
            teacher: prepared by the bench.
            teacher_perplexity: on the evaluation text.
            write: called after each start with the table and the curves so far.
        """
        ratios, baseline = self.config.ratios, self.config.baseline or self.config.starts[0]
        found: dict[str, Any] = {}
        for name in self.config.starts:
            cell = cells[name]
            runs = [self.distill(cell, config, teacher) for config in self.grids[name]]
            runs += self._earlier_runs(cell, runs)
            finished = [run for run in runs if run["finished"]] or runs
            best = min(finished, key=lambda run: run["curve"][-1]["perplexity"])
            tokens_to, fastest = tokens_to_ratios(runs, teacher_perplexity, ratios)
            found[name] = {
                "tokens_before": sum(cell["tokens"].values()),
                "best": best,
                "runs": runs,
                "tokens_to": tokens_to,
                "tokens_to_run": {ratio: run and {key: run[key] for key in GRID} for ratio, run in fastest.items()},
            }
            if baseline in found:
                base = found[baseline]
                spent = max(run["curve"][-1]["tokens"] for run in base["runs"])
                for start in found.values():
                    start["fewer_than"] = fewer_tokens(start["tokens_to"], base["tokens_to"], spent)
            table = {"ratios": [f"{r:g}" for r in ratios], "baseline": baseline, "starts": found}
            write(table, {key: lower_envelope(value["runs"]) for key, value in found.items()})

    def distill(self, cell: Mapping[str, Any], config: DistillConfig, teacher: HybridDecoder) -> dict[str, Any]:
        """One distillation: read where it is there, continued where it was interrupted.

        Args:
            cell: as for :meth:`run`.
            config: one point of the grid.
            teacher: prepared by the bench.

        Returns:
            dict: ``fingerprint``, the point of the grid, ``finished``, ``curve`` of tokens spent and perplexity, and
            ``seconds``, or a ``note`` why it ended.
        """
        bench, start, alignment = self.bench, cell["start"], cell["alignment"]
        made_of = self._run_print(cell, config)
        name = f"{start}.{alignment}.{config.lr:g}.{config.base_lr:g}.{config.tokens}.{config.batch_size}"
        path, state = self.directory / f"{name}.json", RunState(self.directory / f"{name}.state", keep_last=1)
        run = read_cell(path, made_of)
        if run is not None:
            state.remove()  # a kill may have come between the two
            return run
        resume = state.begin(made_of)
        settings = {key: getattr(config, key) for key in GRID}
        bench.log(f"recovery: {start}/{alignment}, {', '.join(f'{key} {value:,}' for key, value in settings.items())}")
        spent = sum(cell["tokens"].values())
        curve = [{"tokens": spent, "perplexity": cell["perplexity"]}]
        run = {"fingerprint": made_of, **settings, "finished": True, "curve": curve}

        try:
            with stop_on_signals() as stop:
                weights = self.weights_path(start, alignment)
                result = self._train(weights, config, teacher, state, resume=resume, should_stop=stop)
            if not result.finished or bench.any_process(stop):
                bench.end_early(f"recovery {start}/{alignment}", result.steps, stop)
        except NonFiniteLossError as error:  # a learning rate of the grid was too high
            bench.log(f"recovery: {start}/{alignment} diverged: {error}")
            run |= {"finished": False, "note": str(error)}
        else:
            rows = [row for row in result.curve if "perplexity" in row]
            curve += [{"tokens": spent + int(row["tokens"]), "perplexity": row["perplexity"]} for row in rows]
            run["seconds"] = round(result.seconds, 3)
        finally:
            # The student is a cycle under FSDP2, which only the collector ends; the next one has no room beside it.
            free(bench.ctx.device)
        if bench.ctx.is_first:
            write_json(path, run)
        state.remove()
        return run

    def _train(
        self, weights: Path, config: DistillConfig, teacher: HybridDecoder, state: RunState, **options: Any
    ) -> DistillResult:
        """A distillation whose student nobody holds afterwards."""
        bench = self.bench
        student = self._student(read_tensors(weights))

        def evaluate(step: int) -> dict[str, float]:
            due = step == config.steps or _is_evaluated(step, config.eval_every_steps)
            return {"perplexity": bench.perplexity(student, label=f"step {step}")} if due else {}

        return distill(
            student,
            teacher,
            bench.stream(bench.data["training"], config.batch_size, seed=bench.seed + 1),
            config=dataclasses.replace(config, eval_every_steps=1),  # `evaluate` chooses
            ctx=bench.ctx,
            loss=self.loss,
            on_eval=evaluate,
            run_state=state,
            **options,
            progress=bench.ctx.is_first,
        )

    def _run_print(self, cell: Mapping[str, Any], config: DistillConfig) -> str:
        loss = self.bench.cfg.get("kd_loss")
        plain = {**dataclasses.asdict(config), "optimizer": dict(config.optimizer or {})}
        text = self.bench.data_fingerprint("training")
        return fingerprint(cell["fingerprint"], plain, OmegaConf.to_container(loss) if loss else None, text)

    def _earlier_runs(self, cell: Mapping[str, Any], runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Finished runs from this cell with other values of the grid, which are the same in everything else."""
        known = {run["fingerprint"] for run in runs}
        found = []
        for path in sorted(self.directory.glob(f"{cell['start']}.{cell['alignment']}.*.json")):
            run = json.loads(path.read_text(encoding="utf-8"))
            if run["fingerprint"] in known or not all(key in run for key in GRID):
                continue
            if run["fingerprint"] == self._run_print(cell, self._distill_config(**{key: run[key] for key in GRID})):
                found.append(run)
        return found

    def _student(self, mixers: Mapping[str, Tensor]) -> HybridDecoder:
        """The hybrid with these mixers, float32, ready to train."""
        bench = self.bench
        weights: dict[str, Tensor] = {}
        if bench.ctx.is_first:
            weights = student_state_dict(bench.teacher_checkpointer.load_checkpoint()[training.MODEL_KEY], mixers)
        return bench.spread(bench.student_on_meta(torch.float32), weights)


def read_cell(path: Path, made_of: str) -> dict[str, Any] | None:
    """A finished cell or run.

    Args:
        path: its file.
        made_of: fingerprint of its inputs.

    Returns:
        dict or None: None where the file is missing or was made from other inputs.
    """
    if not path.is_file():
        return None
    cell: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return cell if cell.get("fingerprint") == made_of else None


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]


def _is_evaluated(step: int, every: int | None) -> bool:
    """Every so many steps, and thrice before: the perplexity falls fastest at the beginning."""
    return every is not None and (step % every == 0 or step in (every // 8, every // 4, every // 2))
