"""Teacher and students of a run, from what its stages left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torchtune import training

from tcal_components.evaluation.load import free
from tcal_components.initialize.initialize import initialize_mixers
from tcal_components.modules.conversion import converted, student_state_dict
from tcal_components.modules.hybrid_decoder import HybridDecoder
from tcal_components.pipeline.config import PipelineConfig
from tcal_components.pipeline.stages import Stages
from tcal_components.precision.float8 import apply_float8, without_float8
from tcal_components.setup import Workbench


class Models:
    """Builds the models of a run. Every process calls every method together.

    Args:
        bench: of the run.
        config: its sections, complete.
        stages: what they left.
    """

    def __init__(self, bench: Workbench, config: PipelineConfig, stages: Stages) -> None:
        self.bench, self.config, self.stages = bench, config, stages
        self._teacher: HybridDecoder | None = None

    @property
    def teacher(self) -> HybridDecoder:
        """The teacher, read when it is first needed."""
        if self._teacher is None:
            self._teacher = self.bench.load_teacher(float8=self.config.precision.teacher == "float8")
        return self._teacher

    def drop_teacher(self) -> None:
        """Frees the teacher's memory."""
        self._teacher = None
        free(self.bench.ctx.device)

    def naive(self) -> dict[str, Tensor]:
        """Mixers of the plain copy, which the report compares with: ``layers.{i}.attn.{name}``."""
        bench = self.bench
        return initialize_mixers(
            "naive",
            statistics=None,
            batches=[],
            teacher=self.teacher,
            layers=bench.converted,
            gdn_spec=bench.gdn,
            seed=bench.seed,
            autocast_dtype=bench.ctx.autocast_dtype,
        ).weights

    def student_weights(self, stage: str) -> dict[str, Tensor]:
        """All weights of a stage's student; those that it does not leave itself are the teacher's.

        Args:
            stage: ``initialize``, ``align`` or ``distill``.

        Returns:
            By name in the first process, which reads them; nothing in the others.
        """
        if not self.bench.ctx.is_first:
            return {}
        weights = self.stages.read(stage)
        if stage == "distill":
            return weights
        teacher: dict[str, Tensor] = self.bench.teacher_checkpointer.load_checkpoint()[training.MODEL_KEY]
        return student_state_dict(teacher, weights)

    def student(self, weights: Mapping[str, Tensor]) -> tuple[HybridDecoder, dict[str, Any]]:
        """The hybrid over the processes, ready to train.

        Args:
            weights: of :meth:`student_weights`.

        Returns:
            The student, and for the report what of it computes in float8.
        """
        bench, float8 = self.bench, {}
        student = bench.student_on_meta(self.config.master_dtype)
        if self.config.precision.student == "float8":
            layers = apply_float8(student, device=bench.ctx.device, sharded=bench.ctx.world_size > 1)
            bench.log(layers.summary())
            float8 = {"student": len(layers.converted), "student_left_out": layers.kept}
        run = self.config.run
        options = {"activation_checkpointing": run.enable_activation_checkpointing, "compile": run.compile}
        return bench.spread(student, weights, **options), float8

    @contextmanager
    def exported(self, distilled: HybridDecoder | None) -> Iterator[nn.Module]:
        """The student that is exported; while it is there, the teacher may not be.

        Args:
            distilled: it, where the distillation has just ended; else it is built.

        Yields:
            The student, which computes as its exported weights will.
        """
        stage = self.stages.exports
        if stage == "distill":
            student = distilled or self.student(self.student_weights(stage))[0]
            with without_float8(student):
                yield student
        else:
            mixers = self.bench.mixers(self.stages.read(stage)).requires_grad_(False)
            with converted(self.teacher, mixers) as hybrid:
                yield hybrid
