"""Speed and memory of training steps with random weights: the recipes' own loops on synthetic packed text."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tcal_components.align.aligner import Aligner
from tcal_components.align.config import AlignConfig
from tcal_components.benchmark.flops import ModelFlops
from tcal_components.benchmark.synthetic import SyntheticPacks, random_weights_
from tcal_components.benchmark.variants import OPTIMIZERS, Variant
from tcal_components.data import BatchStream, prepare_batch
from tcal_components.distill import DistillConfig, Distiller, LinearKL, train
from tcal_components.distributed import ParallelContext, materialize, parallelize, to_storage_dtype
from tcal_components.evaluation.loss_head import DenseKL
from tcal_components.models._decoder import build_decoder
from tcal_components.models.memory import estimate_memory
from tcal_components.modules.conversion import build_mixers
from tcal_components.modules.hybrid_decoder import HybridDecoder
from tcal_components.modules.spec import DecoderSpec, GatedDeltaNetSpec
from tcal_components.precision.dtypes import parse_dtype
from tcal_components.precision.float8 import apply_float8

GIB = 2**30


class StepClock:
    """Asked before every step; notes when, and lets the peak of memory start anew after the warm-up.

    Args:
        device: of the computation.
        warm_up: steps that do not count.
    """

    def __init__(self, device: torch.device, warm_up: int) -> None:
        self.device, self.warm_up = device, warm_up
        self.marks: list[float] = []

    def __call__(self) -> bool:
        """Marks the time; the answer to "stop?" is no."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            if len(self.marks) == self.warm_up:
                torch.cuda.reset_peak_memory_stats(self.device)
        self.marks.append(time.perf_counter())
        return False

    @property
    def seconds(self) -> float:
        """Median of the steps that count."""
        steps = [later - mark for mark, later in zip(self.marks, self.marks[1:])]
        return statistics.median(steps[self.warm_up :])


class TrainingSpeed:
    """Measures variants of one student and teacher.

    Args:
        spec: numbers of the teacher.
        retained_layers: layers that keep attention in the student.
        gdn: sizes of the mixers.
        ctx: the processes.
        peak_tflops: dense bf16 peak of one device, of which the share is reported.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        *,
        retained_layers: Sequence[int],
        gdn: GatedDeltaNetSpec,
        ctx: ParallelContext,
        peak_tflops: float,
    ) -> None:
        self.spec, self.gdn, self.ctx, self.peak_tflops = spec, gdn.resolve(spec), ctx, peak_tflops
        self.retained = tuple(retained_layers)
        self.converted = tuple(layer for layer in range(spec.num_layers) if layer not in self.retained)

    def check(self, name: str, variant: Variant) -> None:
        """Refuses what a variant asks for in vain.

        Raises:
            ValueError: one line.
        """
        if variant.batch_size % self.ctx.world_size:
            raise ValueError(
                f"variants.{name}: batch_size {variant.batch_size} counts sequences over all processes and must be a "
                f"multiple of their number, {self.ctx.world_size}"
            )
        if variant.seq_len > self.spec.max_seq_len:
            raise ValueError(
                f"variants.{name}: seq_len {variant.seq_len} exceeds the model's max_seq_len {self.spec.max_seq_len}"
            )
        if variant.stage == "align" and variant.student == "float8":
            raise ValueError(f"variants.{name}: alignment trains float32 mixers; student: float8 is for distill")

    def measure(self, variant: Variant) -> dict[str, Any]:
        """Runs one variant; every process calls it.

        Args:
            variant: what to run.

        Returns:
            The row: ``status`` is ``ok`` or ``out of memory``; numbers are the slowest and fullest process's.
        """
        row: dict[str, Any] = dataclasses.asdict(variant)
        row["expected_gib"] = self._expected(variant) / GIB
        free_memory(self.ctx.device)
        try:
            row |= self._align(variant) if variant.stage == "align" else self._distill(variant)
            row["status"] = "ok"
        except torch.OutOfMemoryError:
            row["status"] = "out of memory"
        free_memory(self.ctx.device)
        return row

    def _expected(self, variant: Variant) -> float:
        estimate = estimate_memory(
            self.spec,
            retained_layers=self.retained,
            gdn=self.gdn,
            teacher_dtype=self.ctx.dtype,
            student_dtype=parse_dtype(variant.weights, "weights"),
            optimizer=OPTIMIZERS[variant.optimizer],
            float8_teacher=variant.teacher == "float8" and not variant.emulate_float8,
        )
        return estimate.of_process([variant.stage], processes=self.ctx.world_size, dp_replicate=self.ctx.dp_replicate)

    def _model(self, variant: Variant, *, student: bool) -> HybridDecoder:
        """Student or teacher with random weights made on the device; no process holds or moves a full copy."""
        precision = variant.student if student else variant.teacher
        dtype = parse_dtype(variant.weights, "weights") if student else self.ctx.dtype
        hybrid: dict[str, Any] = {"retained_layers": self.retained, "gdn": self.gdn} if student else {}
        with torch.device("meta"):
            model = build_decoder(self.spec, **hybrid)
        to_storage_dtype(model, dtype)
        options: dict[str, Any] = {
            "device": self.ctx.device,
            "frozen": not student,
            "sharded": self.ctx.world_size > 1,
            "recipe": variant.float8_recipe,
            "emulate": variant.emulate_float8,
        }
        # Weights that are quantised for good have to be there first.
        quantised = not student and self.ctx.world_size == 1
        if precision == "float8" and not quantised:
            apply_float8(model, **options)
        parallelize(
            model,
            ctx=self.ctx,
            activation_checkpointing=student and variant.activation_checkpointing,
            compile=variant.compile,
            reshard_after_forward=variant.reshard_after_forward,
        )
        materialize(model, ctx=self.ctx)
        random_weights_(model, seed=2 * self.ctx.rank + student)
        if precision == "float8" and quantised:
            apply_float8(model, **options)
        return model.train() if student else model.eval().requires_grad_(False)

    def _stream(self, variant: Variant) -> tuple[SyntheticPacks, BatchStream]:
        rows = variant.batch_size * (variant.warm_up + variant.steps)
        packs = SyntheticPacks(
            rows=rows, seq_len=variant.seq_len, vocab_size=self.spec.vocab_size, documents=variant.documents
        )
        stream = BatchStream(
            packs, batch_size=variant.batch_size, seed=0, rank=self.ctx.rank, world_size=self.ctx.world_size
        )
        return packs, stream

    def _distill(self, variant: Variant) -> dict[str, Any]:
        teacher, student = self._model(variant, student=False), self._model(variant, student=True)
        packs, stream = self._stream(variant)
        optimizer = dict(OPTIMIZERS[variant.optimizer])
        if variant.optimizer == "adamw8bit":
            optimizer["bf16_stochastic_round"] = variant.weights == "bf16"
        steps = variant.warm_up + variant.steps
        clock = StepClock(self.ctx.device, variant.warm_up)
        distiller = Distiller(
            student,
            teacher,
            stream,
            config=DistillConfig(
                tokens=steps * variant.batch_size * variant.seq_len,
                batch_size=variant.batch_size,
                seq_len=variant.seq_len,
                micro_batch_size=variant.micro_batch_size,
                lr=1e-5,
                base_lr=1e-5,
                warmup_steps=0,
                optimizer=optimizer,
            ),
            ctx=self.ctx,
            loss=DenseKL() if variant.loss == "dense" else LinearKL(),
            progress=False,
        )
        resident = self._allocated()
        curve = train(distiller, should_stop=clock).curve
        clock()
        return self._numbers(variant, packs, clock, resident, curve[-1]["loss"])

    def _align(self, variant: Variant) -> dict[str, Any]:
        teacher = self._model(variant, student=False)
        mixers = build_mixers(self.spec, self.gdn, self.converted, device=self.ctx.device)
        for parameter in mixers.parameters():
            if self.ctx.world_size > 1:
                dist.broadcast(parameter.data, src=0)  # replicas start alike
        packs, stream = self._stream(variant)
        steps = variant.warm_up + variant.steps
        autocast = self.ctx.autocast_dtype
        aligner = Aligner(
            teacher=teacher,
            mixers=mixers,
            config=AlignConfig(steps=steps, batch_size=variant.batch_size, seq_len=variant.seq_len),
            autocast_dtype=autocast,
        )
        resident = self._allocated()
        clock = StepClock(self.ctx.device, variant.warm_up)
        for step in range(steps):
            clock()
            result = aligner.train_step(prepare_batch(stream.batch(step), self.ctx.device))
        clock()
        return self._numbers(variant, packs, clock, resident, statistics.mean(result["error"].values()))

    def _allocated(self) -> float:
        return torch.cuda.memory_allocated(self.ctx.device) / GIB if self.ctx.device.type == "cuda" else 0.0

    def _numbers(
        self, variant: Variant, packs: SyntheticPacks, clock: StepClock, resident: float, loss: float
    ) -> dict[str, Any]:
        cuda = self.ctx.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self.ctx.device) / GIB if cuda else 0.0
        reserved = torch.cuda.max_memory_reserved(self.ctx.device) / GIB if cuda else 0.0
        worst = torch.tensor([clock.seconds, resident, peak, reserved], dtype=torch.float64, device=self.ctx.device)
        if self.ctx.world_size > 1:
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        seconds, resident, peak, reserved = worst.tolist()
        flops = ModelFlops(self.spec, retained_layers=self.retained, gdn=self.gdn, attended=packs.attended)
        per_token = flops.alignment() if variant.stage == "align" else flops.distillation()
        tokens = variant.batch_size * variant.seq_len
        tflops = tokens * per_token / seconds / 1e12
        return {
            "seconds_per_step": seconds,
            "tokens_per_second": tokens / seconds,
            "model_flops_per_token": per_token,
            "tflops_per_device": tflops / self.ctx.world_size,
            "share_of_peak": tflops / self.ctx.world_size / self.peak_tflops if cuda else None,
            "before_training_gib": resident if cuda else None,
            "peak_memory_gib": peak if cuda else None,
            "peak_reserved_gib": reserved if cuda else None,
            "measured_loss": loss,
            "step_seconds": [later - mark for mark, later in zip(clock.marks, clock.marks[1:])],
        }


def free_memory(device: torch.device) -> None:
    """Gives back what the last variant held; models under FSDP2 are cycles, which only the collector frees."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
