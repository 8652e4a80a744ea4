"""Full-parameter distillation of a hybrid from its teacher.

Torchtune 0.6.1's own knowledge-distillation recipes take LoRA models only and divide the loss by the number of tokens twice.
This loop uses torchtune's parts (schedule, seeds, component instantiation, loggers) and counts every token once: gradients
and logged losses are means over the *global* batch, whatever the number of processes or the size of a micro-batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtune import utils
from tqdm import tqdm

from tcal_components.checkpoint.optimizer_state import initialize_optimizer, optimizer_state, restore_optimizer
from tcal_components.checkpoint.run_state import RunState
from tcal_components.data import BatchStream, prepare_batch
from tcal_components.distill.best import BestWeights
from tcal_components.distill.config import DistillConfig, DistillResult
from tcal_components.distill.loss import LinearKL
from tcal_components.distill.model import DistillModel
from tcal_components.distill.optimizer import build_optimizer, build_schedule, parameter_groups
from tcal_components.distributed.parallel import ParallelContext, reshard
from tcal_components.modules.hybrid_decoder import HybridDecoder

log = utils.get_logger("INFO")

OnLog = Callable[[dict[str, float], int], None]
OnEval = Callable[[int], Mapping[str, float]]


class NonFiniteLossError(FloatingPointError):
    """The loss or its gradient is not a number; no weight was changed by it."""


class Distiller:
    """The distillation loop with its optimizer, schedule and checkpoints.

    Args:
        student: prepared by ``parallelize``, with its weights.
        teacher: likewise; it is frozen here.
        stream: this process's part of every global batch, by step.
        config: the settings.
        ctx: the processes.
        loss: default ``LinearKL()``, forward KL.
        run_state: where to save, and to continue from if ``resume``; None never saves.
        resume: continue from the latest checkpoint in ``run_state`` if there is one.
        heldout: gives this process's part of text that is neither trained on nor reported, prepared batches; the weights
            with the least loss on it are what the student ends with. None, or ``config.keep_best`` false, ends with the last.
        on_eval: called by every process with the step after ``eval_every_steps`` and at the end; its numbers join the curve.
        on_log: called by the first process with numbers and step, such as a torchtune metric logger's ``log_dict``.
        should_stop: asked before every step; any process's yes saves and ends the loop, as before a preemption.
        on_step: called by every process after each optimizer step, such as a profiler's ``step``.
        progress: show a bar in the first process.

    Raises:
        ValueError: if the stream and the config disagree, or a checkpoint does not fit.
    """

    def __init__(
        self,
        student: HybridDecoder,
        teacher: HybridDecoder,
        stream: BatchStream,
        *,
        config: DistillConfig,
        ctx: ParallelContext,
        loss: LinearKL | None = None,
        run_state: RunState | None = None,
        resume: bool = False,
        heldout: Callable[[], Iterable[Mapping[str, Any]]] | None = None,
        on_eval: OnEval | None = None,
        on_log: OnLog | None = None,
        should_stop: Callable[[], bool] | None = None,
        on_step: Callable[[], None] | None = None,
        progress: bool = True,
    ) -> None:
        if stream.batch_size != config.batch_size:
            raise ValueError(f"distill.batch_size is {config.batch_size}, but the data come {stream.batch_size} a step")
        self.config, self.ctx, self.stream = config, ctx, stream
        self.student = student.train()
        self.model = DistillModel(
            student, teacher, loss or LinearKL(), activation_offloading=config.activation_offloading
        )
        self.run_state, self.resume = run_state, resume
        self.on_eval, self.on_log, self.on_step, self.should_stop = on_eval, on_log, on_step, should_stop
        self.heldout = heldout if config.keep_best else None
        self.best = BestWeights(student, run_state)
        self.progress = progress and ctx.is_first
        groups = parameter_groups(student, lr=config.lr, base_lr=config.base_lr, weight_decay=config.weight_decay)
        self.peak_rates = [group["lr"] for group in groups]
        self.parameters = [parameter for group in groups for parameter in group["params"]]
        self.optimizer = build_optimizer(groups, config.optimizer)
        self.step = 0
        self.seconds = 0.0
        self.curve: list[dict[str, float]] = []
        self._saved_at: int | None = None

    def run(self) -> DistillResult:
        """Train to the end, or until asked to stop.

        Returns:
            The curve and the counts.

        Raises:
            NonFiniteLossError: if a loss or gradient is not finite; the last good state is saved first.
        """
        if self.resume and self.run_state is not None and self.run_state.latest() is not None:
            self._load()
        else:
            self.best.begin()
        schedule = self._schedule()
        began, earlier = time.perf_counter(), self.seconds
        if self.heldout is not None and self.best.step is None:
            self._judge()
        mark, mark_step = began, self.step
        bar = tqdm(
            total=self.config.steps * self._tokens_a_step, initial=self.step * self._tokens_a_step, unit="tok",
            unit_scale=True, desc="distill", disable=not self.progress,
        )  # fmt: skip
        finished = True
        with bar:
            while self.step < self.config.steps:
                batch = self.stream.batch(self.step)
                counted, stop = self._agree(batch)
                if stop:
                    finished = False
                    break
                lr = float(schedule.get_last_lr()[-1])
                # A function of seed and step alone, so that a resumed run needs no saved generator state.
                torch.manual_seed((self.config.seed * 1_000_003 + self.step) * self.ctx.world_size + self.ctx.rank)
                losses, norm = self._accumulate(batch, counted)
                self._check_finite(losses[2], norm, lr)
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
                schedule.step()
                self.step += 1
                if self.on_step is not None:
                    self.on_step()
                self.seconds = earlier + time.perf_counter() - began
                bar.update(self._tokens_a_step)
                bar.set_postfix(loss=f"{losses[0]:.4f}", refresh=False)
                last = self.step == self.config.steps
                entry: dict[str, float] = {}
                if last or self.step % self.config.log_every_steps == 0:
                    now = time.perf_counter()
                    speed = (self.step - mark_step) * self._tokens_a_step / max(now - mark, 1e-9)
                    mark, mark_step = now, self.step
                    entry = {"loss": losses[0], "ce": losses[1], "lr": lr, "grad_norm": norm}
                    self._log({**entry, "tokens_per_second": speed, **self._memory()})
                every = self.config.eval_every_steps
                if last or (every and self.step % every == 0):
                    entry |= self._evaluate()
                    mark = time.perf_counter()  # evaluation is not training speed
                if entry:
                    self.curve.append({"step": self.step, "tokens": self.step * self._tokens_a_step, **entry})
                self.seconds = earlier + time.perf_counter() - began
                every = self.config.save_every_steps
                if last or (every and self.step % every == 0):
                    self._save()
                    mark = time.perf_counter()
        if not finished:
            self._save()
        reshard(self.student)
        result = DistillResult(self.curve, self.step, self.step * self._tokens_a_step, self.seconds, finished)
        if finished and self.best.step is not None:
            result.best_step = self.best.step
            result.heldout_loss = {"first": self.best.first, "best": self.best.loss, "last": self.best.last}
            if self.best.step != self.step:
                self.best.restore()
        return result

    @property
    def _tokens_a_step(self) -> int:
        return self.config.batch_size * self.config.seq_len

    def _agree(self, batch: Mapping[str, Tensor]) -> tuple[int, bool]:
        """Counted tokens of the global batch, and whether any process wants to stop: one exchange for both."""
        ignore = self.model.loss.settings.ignore_index
        stop = self.should_stop is not None and self.should_stop()
        mine = torch.tensor([int((batch["labels"] != ignore).sum()), int(stop)], device=self.ctx.device)
        counted, stops = self.ctx.all_sum(mine).tolist()
        return counted, stops > 0

    def _accumulate(self, batch: Mapping[str, Tensor], counted: int) -> tuple[list[float], float]:
        """Gradients of the mean loss over the global batch; returns mean KL and cross-entropy, and the gradient's norm."""
        sums = torch.zeros(3, dtype=torch.float64, device=self.ctx.device)
        size = self.config.micro_batch_size or len(batch["tokens"])
        for start in range(0, len(batch["tokens"]), size):
            micro = prepare_batch({k: v[start : start + size] for k, v in batch.items()}, self.ctx.device)
            with self.ctx.autocast():
                total, parts = self.model(
                    micro["tokens"], micro["labels"], mask=micro["mask"], input_pos=micro["input_pos"]
                )
            # FSDP2 averages gradients over processes; the sum over all tokens is wanted.
            (total * (self.ctx.world_size / max(counted, 1))).backward()
            sums += torch.stack([parts["kl_sum"], parts["ce_sum"], total.detach()])
        kl, ce, total_loss = (self.ctx.all_sum(sums) / max(counted, 1)).tolist()
        return [kl, ce, total_loss], self._clip()

    def _clip(self) -> float:
        """Clips the gradients in place; returns their norm before."""
        # By itself torch takes its multi-tensor kernels for plain tensors only: two launches a parameter under FSDP2.
        foreach = True if all(p.device.type == "cuda" for p in self.parameters) else None
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, foreach=foreach)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if self.config.clip_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.config.clip_grad_norm, norm, foreach=foreach)
        return float(norm)

    def _check_finite(self, loss: float, norm: float, lr: float) -> None:
        if math.isfinite(loss) and math.isfinite(norm):
            return
        self.optimizer.zero_grad(set_to_none=True)
        where = "no checkpoint was asked for"
        if self.run_state is not None:
            self._save()
            where = f"weights and optimizer after step {self.step} are in {self.run_state.directory}"
        raise NonFiniteLossError(
            f"distillation stopped at step {self.step + 1} of {self.config.steps}: loss {loss}, gradient norm {norm}, "
            f"learning rate {lr:.3g}; {where}; lower distill.lr and distill.base_lr, or set dtype to fp32, and start anew"
        )

    def _schedule(self) -> torch.optim.lr_scheduler.LambdaLR:
        """The schedule at the current step; LambdaLR derives the rate from the step alone."""
        for group, peak in zip(self.optimizer.param_groups, self.peak_rates, strict=True):
            group["initial_lr"] = peak
        return build_schedule(self.optimizer, self.config, step=self.step)

    def _log(self, values: dict[str, float]) -> None:
        if self.on_log is not None and self.ctx.is_first:
            self.on_log(values, self.step)

    def _memory(self) -> dict[str, float]:
        # torchtune 0.6.1's get_memory_stats raises on CPU.
        if self.ctx.device.type != "cuda":
            return {}
        return {"peak_memory_gib": torch.cuda.max_memory_allocated(self.ctx.device) / 2**30}

    def _evaluate(self) -> dict[str, float]:
        values = {} if self.heldout is None else {"heldout_loss": self._judge()}
        if self.on_eval is not None:
            self.student.eval()
            with torch.no_grad():
                values |= {name: float(value) for name, value in self.on_eval(self.step).items()}
            reshard(self.student)
            self.student.train()
        if values:
            self._log(values)
        return values

    def _judge(self) -> float:
        """Mean loss on the held-out text; keeps the weights if there were none better."""
        assert self.heldout is not None
        sums = torch.zeros(2, dtype=torch.float64, device=self.ctx.device)
        self.student.eval()
        with torch.no_grad(), self.ctx.autocast():
            for batch in self.heldout():
                total, parts = self.model(
                    batch["tokens"], batch["labels"], mask=batch["mask"], input_pos=batch["input_pos"]
                )
                sums += torch.stack([total.double(), parts["tokens"].double()])
        reshard(self.student)
        self.student.train()
        total, counted = self.ctx.all_sum(sums).tolist()
        loss = total / max(counted, 1)
        rises = self.best.offer(self.step, loss)
        if rises and self.ctx.is_first:
            log.warning(
                "distill: the held-out loss rose from %.4g at the start to %.4g after %d steps; lower distill.lr (%g) and "
                "distill.base_lr (%g) if it stays there: the best weights are kept, so far those of step %d",
                *(self.best.first, loss, self.step, self.config.lr, self.config.base_lr, self.best.step),
            )
        return loss

    def _save(self) -> None:
        if self.run_state is None or self._saved_at == self.step:
            return
        extra = {"curve": self.curve, "seconds": self.seconds, "tokens_per_step": self._tokens_a_step}
        self.run_state.save(self.step, self._state(), {**extra, "best": self.best.extra()})
        self.best.in_checkpoint()
        self._saved_at = self.step

    def _state(self) -> dict[str, Any]:
        if not self.optimizer.state:
            initialize_optimizer(self.optimizer)
        optimizer = optimizer_state(self.student, self.optimizer)
        return {"model": self.student.state_dict(), "optimizer": optimizer}

    def _load(self) -> None:
        assert self.run_state is not None
        state = self._state()
        self.step, extra = self.run_state.load(state)
        if extra["tokens_per_step"] != self._tokens_a_step:
            raise ValueError(
                f"the checkpoint in {self.run_state.directory} was made with {extra['tokens_per_step']} tokens a step, this "
                f"run has {self._tokens_a_step}; keep distill.batch_size and distill.seq_len, or use another output_dir"
            )
        restore_optimizer(self.student, self.optimizer, state["optimizer"])
        self.curve, self.seconds = extra["curve"], extra["seconds"]
        self.best.resume(extra.get("best"))
        self._saved_at = self.step


def distill(
    student: HybridDecoder,
    teacher: HybridDecoder,
    stream: BatchStream,
    *,
    config: DistillConfig,
    ctx: ParallelContext,
    loss: LinearKL | None = None,
    on_eval: OnEval | None = None,
    on_log: OnLog | None = None,
    run_state: RunState | None = None,
    resume: bool = False,
    heldout: Callable[[], Iterable[Mapping[str, Any]]] | None = None,
    should_stop: Callable[[], bool] | None = None,
    on_step: Callable[[], None] | None = None,
    progress: bool = True,
) -> DistillResult:
    """Distil; see ``Distiller`` for the arguments and ``DistillResult`` for what comes back."""
    return Distiller(
        student, teacher, stream, config=config, ctx=ctx, loss=loss, run_state=run_state, resume=resume,
        heldout=heldout, on_eval=on_eval, on_log=on_log, should_stop=should_stop, on_step=on_step,
        progress=progress,
    ).run()  # fmt: skip
