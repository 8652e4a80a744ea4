"""What a distillation's loop is made of, all but the loop.

Torchtune 0.6.1's own knowledge-distillation recipes take LoRA models only and divide the loss by the number of tokens twice.
Here torchtune's parts are used (schedule, seeds, component instantiation, loggers) and every token is counted once: gradients
and logged losses are means over the *global* batch, whatever the number of processes or the size of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torchtune import utils

from tcal_components.checkpoint.optimizer_state import initialize_optimizer, optimizer_state, restore_optimizer
from tcal_components.checkpoint.run_state import RunState
from tcal_components.data import BatchStream, prepare_batch
from tcal_components.distill.best import BestWeights
from tcal_components.distill.config import DistillConfig, DistillResult
from tcal_components.distill.gradient import NonFiniteLossError, clip_gradient_
from tcal_components.distill.loss import LinearKL
from tcal_components.distill.meter import Meter, token_bar
from tcal_components.distill.model import DistillModel
from tcal_components.distill.optimizer import build_optimizer, build_schedule, parameter_groups
from tcal_components.distributed.parallel import ParallelContext, reshard
from tcal_components.modules.hybrid_decoder import HybridDecoder

log = utils.get_logger("INFO")


class Distiller:
    """Model, optimizer, schedule, best weights and checkpoints of a distillation, and how far it is.

    The loop over them is in ``recipes/taylor_calibrate_kd.py``, and in :func:`~tcal_components.distill.loop.train` for those
    who need none of their own. Every process of the run calls every method together.

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
        progress: show a bar in the first process.

    Attributes:
        model: :class:`DistillModel`, the loss of a batch.
        optimizer: of the student.
        schedule: its learning rates; there after :meth:`begin`.
        step: optimizer steps done; the loop counts.
        curve: what :meth:`record` was given.
        seconds: training and evaluation so far, earlier runs included.

    Raises:
        ValueError: if the stream and the config disagree.
    """

    schedule: torch.optim.lr_scheduler.LambdaLR
    meter: Meter

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
        self.heldout = heldout if config.keep_best else None
        self.best = BestWeights(student, run_state)
        self.progress = progress and ctx.is_first
        groups = parameter_groups(student, lr=config.lr, base_lr=config.base_lr, weight_decay=config.weight_decay)
        self.peak_rates = [group["lr"] for group in groups]
        self.parameters = [parameter for group in groups for parameter in group["params"]]
        self.optimizer = build_optimizer(groups, config.optimizer)
        self.tokens_a_step = config.batch_size * config.seq_len
        self.step = 0
        self.seconds = 0.0
        self.curve: list[dict[str, float]] = []
        self._saved_at: int | None = None

    # --------------------------------------------------------------------------------------- the beginning and the end

    def begin(self) -> None:
        """Loads the checkpoint to continue from, or begins anew and judges the student as it is.

        Raises:
            ValueError: a checkpoint that does not fit.
        """
        if self.resume and self.run_state is not None and self.run_state.latest() is not None:
            self._load()
        else:
            self.best.begin()
        for group, peak in zip(self.optimizer.param_groups, self.peak_rates, strict=True):
            group["initial_lr"] = peak
        self.schedule = build_schedule(self.optimizer, self.config, step=self.step)
        self.meter = Meter(self.tokens_a_step, self.ctx.device, step=self.step, seconds=self.seconds)
        if self.best.step is None:
            self.judge()

    def end(self) -> DistillResult:
        """Saves what is not saved, and gives the student its best weights if all steps are done.

        Returns:
            DistillResult: the curve and the counts.
        """
        self.save()
        reshard(self.student)
        finished = self.step == self.config.steps
        result = DistillResult(self.curve, self.step, self.step * self.tokens_a_step, self.seconds, finished)
        if finished and self.best.step is not None:
            result.best_step = self.best.step
            result.heldout_loss = {"first": self.best.first, "best": self.best.loss, "last": self.best.last}
            if self.best.step != self.step:
                self.best.restore()
        return result

    # ------------------------------------------------------------------------------------------------- parts of a step

    def due(self, every: int | None) -> bool:
        """Whether something is to be done after this step: every so many steps, and after the last one."""
        return self.step == self.config.steps or bool(every and self.step % every == 0)

    def agree(self, batch: Mapping[str, Tensor], stop: bool = False) -> tuple[int, bool]:
        """What the processes have to know of one another before a step, in one exchange.

        Args:
            batch: this process's part.
            stop: whether this process was asked to stop.

        Returns:
            The tokens of the global batch that have a label (at least 1, so that one can divide by it), and whether any
            process was asked to stop.
        """
        labelled = batch["labels"] != self.model.loss.settings.ignore_index
        counted, stops = self.ctx.all_sum(
            torch.tensor([int(labelled.sum()), int(stop)], device=self.ctx.device)
        ).tolist()
        return max(counted, 1), stops > 0

    def seed(self) -> None:
        """Seeds what is random in a step by seed and step alone, so that a resumed run needs no saved generator state."""
        torch.manual_seed((self.config.seed * 1_000_003 + self.step) * self.ctx.world_size + self.ctx.rank)

    def micro_batches(self, batch: Mapping[str, Tensor]) -> Iterator[dict[str, Any]]:
        """Cuts this process's part of a batch into what one forward pass takes.

        Args:
            batch: tensors [B, T].

        Yields:
            Arguments of ``model``: ``tokens`` and ``labels`` [b, T], ``mask``, ``input_pos``, on this process's device.
        """
        size = self.config.micro_batch_size or len(batch["tokens"])
        for start in range(0, len(batch["tokens"]), size):
            micro = prepare_batch({k: v[start : start + size] for k, v in batch.items()}, self.ctx.device)
            yield _arguments(micro)

    def clip(self) -> float:
        """Clips the gradient to ``config.clip_grad_norm``; returns its norm before."""
        return clip_gradient_(self.parameters, self.config.clip_grad_norm)

    def check_finite(self, loss: float, norm: float) -> None:
        """Refuses a step that would end in weights that are no numbers.

        Args:
            loss: of the global batch.
            norm: of its gradient.

        Raises:
            NonFiniteLossError: if one of them is not finite; the state before this step is saved first.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            return
        self.optimizer.zero_grad(set_to_none=True)
        where = "no checkpoint was asked for"
        if self.run_state is not None:
            self.save()
            where = f"weights and optimizer after step {self.step} are in {self.run_state.directory}"
        raise NonFiniteLossError(
            f"distillation stopped at step {self.step + 1} of {self.config.steps}: loss {loss}, gradient norm {norm}, "
            f"learning rate {self.rate:.3g}; {where}; lower distill.lr and distill.base_lr, or set dtype to fp32, and "
            "start anew"
        )

    @property
    def rate(self) -> float:
        """Learning rate of the mixers in the next step."""
        return float(self.schedule.get_last_lr()[-1])

    # ----------------------------------------------------------------------------------------------------- evaluations

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Within it the student is evaluated: without gradients, in evaluation mode, and on nobody's training time."""
        self.student.eval()
        with self.meter.paused(), torch.no_grad():
            yield
        reshard(self.student)
        self.student.train()

    def judge(self) -> dict[str, float]:
        """Mean loss on the held-out text; keeps the weights if there were none better.

        Returns:
            ``heldout_loss``, in nats a token; nothing where there is no held-out text.
        """
        if self.heldout is None:
            return {}
        sums = torch.zeros(2, dtype=torch.float64, device=self.ctx.device)
        with self.evaluation(), self.ctx.autocast():
            for batch in self.heldout():
                total, parts = self.model(**_arguments(batch))
                sums += torch.stack([total.double(), parts["tokens"].double()])
        total, counted = self.ctx.all_sum(sums).tolist()
        loss = total / max(counted, 1)
        rises = self.best.offer(self.step, loss)
        if rises and self.ctx.is_first:
            log.warning(
                "distill: the held-out loss rose from %.4g at the start to %.4g after %d steps; lower distill.lr (%g) and "
                "distill.base_lr (%g) if it stays there: the best weights are kept, so far those of step %d",
                *(self.best.first, loss, self.step, self.config.lr, self.config.base_lr, self.best.step),
            )
        return {"heldout_loss": loss}

    # ----------------------------------------------------------------------------------------------- counts and a bar

    def progress_bar(self) -> AbstractContextManager[Callable[[float], None]]:
        """A bar of tokens, in the first process; gives what moves it by one step, called with the step's loss."""
        return token_bar(self.tokens_a_step, step=self.step, steps=self.config.steps, shown=self.progress)

    def speed(self) -> dict[str, float]:
        """Tokens a second since the last call, evaluations and checkpoints left out, and the peak memory of a GPU in GiB."""
        return self.meter.speed(self.step)

    def record(self, row: Mapping[str, float]) -> None:
        """Counts the time of a step, and adds what was measured after it to the curve; an empty row adds nothing."""
        self.seconds = self.meter.seconds
        if row:
            self.curve.append({"step": self.step, "tokens": self.step * self.tokens_a_step, **row})

    # ----------------------------------------------------------------------------------------------------- checkpoints

    def save(self) -> None:
        """Writes weights, optimizer, curve and best weights, if there is a place for them and this step is not there yet."""
        if self.run_state is None or self._saved_at == self.step:
            return
        extra = {"curve": self.curve, "seconds": self.seconds, "tokens_per_step": self.tokens_a_step}
        with self.meter.paused():
            self.run_state.save(self.step, self._state(), {**extra, "best": self.best.extra()})
            self.best.in_checkpoint()
        self._saved_at = self.step

    def _load(self) -> None:
        assert self.run_state is not None
        state = self._state()
        self.step, extra = self.run_state.load(state)
        if extra["tokens_per_step"] != self.tokens_a_step:
            raise ValueError(
                f"the checkpoint in {self.run_state.directory} was made with {extra['tokens_per_step']} tokens a step, this "
                f"run has {self.tokens_a_step}; keep distill.batch_size and distill.seq_len, or use another output_dir"
            )
        restore_optimizer(self.student, self.optimizer, state["optimizer"])
        self.curve, self.seconds = extra["curve"], extra["seconds"]
        self.best.resume(extra.get("best"))
        self._saved_at = self.step

    def _state(self) -> dict[str, Any]:
        if not self.optimizer.state:
            initialize_optimizer(self.optimizer)
        optimizer = optimizer_state(self.student, self.optimizer)
        return {"model": self.student.state_dict(), "optimizer": optimizer}


def _arguments(batch: Mapping[str, Any]) -> dict[str, Any]:
    """What the model takes of a prepared batch."""
    return {name: batch[name] for name in ("tokens", "labels", "mask", "input_pos")}
