"""Recovery by distillation from several starts, each over a grid: how many tokens until the teacher's perplexity is near."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor
from torchtune import training

from tcal_components.ablation.comparison import fewer_tokens, lower_envelope, tokens_to_ratios
from tcal_components.ablation.config import GRID, GridConfig, RecoveryConfig
from tcal_components.checkpoint.artifact import Artifact
from tcal_components.checkpoint.run_state import RunState
from tcal_components.config import ConfigError, check_keys, section
from tcal_components.distill.config import DistillConfig, DistillResult
from tcal_components.distill.gradient import NonFiniteLossError
from tcal_components.distill.loop import distill
from tcal_components.distill.loss import build_loss
from tcal_components.distributed.preemption import stop_on_signals
from tcal_components.evaluation.load import free
from tcal_components.modules.conversion import student_state_dict
from tcal_components.modules.hybrid_decoder import HybridDecoder
from tcal_components.setup import Workbench


class Recovery:
    """The distillations of the grids, each finished one a file in ``directory``; started again, the missing ones are made.

    Runs that an earlier grid left in the same folder count too, so that a grid can be refined start by start.

    Args:
        config: the section.
        bench: config, text and processes of the recipe; its config has ``model`` and may have ``kd_loss`` and ``optimizer``.
        directory: of the runs, and of the weights that they start from.
        cells: what ``starts`` may hold: by name ``START/ALIGNMENT``, what the cell is made from.
        seed: of the distillations.

    Attributes:
        weights: by name, where the mixers lie that a distillation starts from.

    Raises:
        ConfigError: a value that is not allowed.
    """

    def __init__(
        self,
        config: RecoveryConfig,
        *,
        bench: Workbench,
        directory: Path,
        cells: Mapping[str, Mapping[str, Any]],
        seed: int,
    ) -> None:
        self.config, self.bench, self.seed = config, bench, seed
        self._check(list(cells))
        files = {name: directory / f"{name.replace('/', '.')}.safetensors" for name in config.starts}
        self.weights = {name: Artifact(path, cells[name]) for name, path in files.items()}
        self.loss = build_loss(bench.cfg.get("kd_loss"))
        own = {name: section(GridConfig, grid, f"recovery.grids.{name}") for name, grid in config.grids.items()}
        self.grids = {}
        for name in config.starts:
            try:
                self.grids[name] = self._grid(own.get(name))
            except ConfigError as error:  # `recovery.lr` of a start's own grid
                mine = f"recovery.grids.{name}: " if name in own else ""
                raise ConfigError(f"{mine}{error}") from error

    def _grid(self, own: GridConfig | None) -> list[DistillConfig]:
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

    def run(
        self,
        cells: Mapping[str, Mapping[str, Any]],
        *,
        teacher: HybridDecoder,
        teacher_perplexity: float,
    ) -> Iterator[dict[str, Any]]:
        """Distils from each start over the whole of its grid.

        Args:
            cells: by name, of the first seed: ``start``, ``alignment``, ``tokens`` and ``perplexity``.
            teacher: prepared by the bench.
            teacher_perplexity: on the evaluation text.

        Yields:
            After each start the report's sections ``recovery`` and ``recovery_curve`` so far.
        """
        ratios, baseline = self.config.ratios, self.config.baseline or self.config.starts[0]
        found: dict[str, Any] = {}
        for name in self.config.starts:
            cell = cells[name]
            runs = [self.distill(cell, self.weights[name], config, teacher) for config in self.grids[name]]
            runs += self._earlier_runs(self.weights[name], self.grids[name])
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
            curves = {key: lower_envelope(value["runs"]) for key, value in found.items()}
            yield {"recovery": table, "recovery_curve": curves}

    def distill(
        self, cell: Mapping[str, Any], weights: Artifact, config: DistillConfig, teacher: HybridDecoder
    ) -> dict[str, Any]:
        """One distillation: read where it is there, continued where it was interrupted.

        Args:
            cell: as for :meth:`run`.
            weights: its mixers.
            config: one point of the grid.
            teacher: prepared by the bench.

        Returns:
            dict: the point of the grid, ``finished``, ``curve`` of tokens spent and perplexity, and ``seconds``, or a ``note``
            why it ended.
        """
        bench, start, alignment = self.bench, cell["start"], cell["alignment"]
        kept = self._run_file(weights, config)
        state = RunState(kept.path.with_suffix(".state"), keep_last=1)
        if kept.current():
            state.remove()  # a kill may have come between the two
            return kept.load()
        resume = state.begin(kept.inputs)
        settings = {key: getattr(config, key) for key in GRID}
        bench.log(f"recovery: {start}/{alignment}, {', '.join(f'{key} {value:,}' for key, value in settings.items())}")
        spent = sum(cell["tokens"].values())
        curve = [{"tokens": spent, "perplexity": cell["perplexity"]}]
        run: dict[str, Any] = {**settings, "finished": True, "curve": curve}

        try:
            with stop_on_signals() as stop:
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
            kept.save(run)
        state.remove()
        return run

    def _train(
        self, weights: Artifact, config: DistillConfig, teacher: HybridDecoder, state: RunState, **options: Any
    ) -> DistillResult:
        """A distillation whose student nobody holds afterwards."""
        bench = self.bench
        student = self._student(weights.load())

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

    def _run_file(self, weights: Artifact, config: DistillConfig) -> Artifact:
        """Where a distillation from these weights is kept once it has ended."""
        loss = self.bench.cfg.get("kd_loss")
        made_from = {
            "cell": weights.fingerprint,
            "recovery": {**dataclasses.asdict(config), "optimizer": dict(config.optimizer or {})},
            "kd_loss": OmegaConf.to_container(loss) if loss else None,
            "dataset": self.bench.data_fingerprint("training"),
        }
        point = f"{config.lr:g}.{config.base_lr:g}.{config.tokens}.{config.batch_size}"
        return Artifact(weights.path.with_name(f"{weights.path.stem}.{point}.json"), made_from)

    def _earlier_runs(self, weights: Artifact, grid: Sequence[DistillConfig]) -> list[dict[str, Any]]:
        """Finished runs from these weights with other values of the grid, which are the same in everything else."""
        known = {self._run_file(weights, config).path for config in grid}
        found = []
        for path in sorted(set(weights.path.parent.glob(f"{weights.path.stem}.*.json")) - known):
            run = Artifact(path, {}).load()
            if all(key in run for key in GRID):
                kept = self._run_file(weights, self._distill_config(**{key: run[key] for key in GRID}))
                if kept.path == path and kept.current():
                    found.append(run)
        return found

    def _student(self, mixers: Mapping[str, Tensor]) -> HybridDecoder:
        """The hybrid with these mixers, float32, ready to train."""
        bench = self.bench
        weights: dict[str, Tensor] = {}
        if bench.ctx.is_first:
            weights = student_state_dict(bench.teacher_checkpointer.load_checkpoint()[training.MODEL_KEY], mixers)
        return bench.spread(bench.student_on_meta(torch.float32), weights)


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]


def _is_evaluated(step: int, every: int | None) -> bool:
    """Every so many steps, and thrice before: the perplexity falls fastest at the beginning."""
    return every is not None and (step % every == 0 or step in (every // 8, every // 4, every // 2))
