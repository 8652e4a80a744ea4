"""Sizes of teachers and hybrids in closed form, so that an estimate can be printed before any weight is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tcal_components.models._decoder import GdnConfig
from tcal_components.modules.spec import DecoderSpec, GatedDeltaNetSpec, check_retained_layers

GIB = 2**30

# Bytes a value of a moment; torchao has a float32 scale for every 256 values, or 128 of 4 bits. Others have the weights' type.
_MOMENT_BYTES = {"8bit": 1 + 4 / 256, "fp8": 1 + 4 / 256, "4bit": 1 / 2 + 4 / 128}


def count_parameters(
    spec: DecoderSpec, *, retained_layers: Iterable[int] | None = None, gdn: GdnConfig = None
) -> tuple[int, int]:
    """Counts the parameters of a teacher or hybrid without building it.

    Args:
        spec: Numbers of the teacher.
        retained_layers: Layers that keep attention; None counts the teacher. Default: None.
        gdn: Shape of the Gated DeltaNet layers. Default: None, the defaults of ``GatedDeltaNetSpec``.

    Returns:
        tuple[int, int]: All parameters (a tied head counts once), and those of the Gated DeltaNet layers among them.
    """
    embed, q_dim, kv_dim = spec.embed_dim, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention = 2 * embed * q_dim + 2 * embed * kv_dim
    attention += (q_dim + 2 * kv_dim) * spec.qkv_bias + 2 * spec.head_dim * spec.qk_norm
    rest_of_layer = 3 * embed * spec.intermediate_dim + 2 * embed
    heads = _embedding_parameters(spec)
    converted = 0
    if retained_layers is not None:
        converted = spec.num_layers - len(check_retained_layers(retained_layers, spec.num_layers))
    mixers = converted * _mixer_parameters(spec, GatedDeltaNetSpec.from_config(gdn))
    total = heads + embed + spec.num_layers * rest_of_layer + (spec.num_layers - converted) * attention + mixers
    return total, mixers


def _embedding_parameters(spec: DecoderSpec) -> int:
    return spec.vocab_size * spec.embed_dim * (1 if spec.tie_word_embeddings else 2)


def _mixer_parameters(spec: DecoderSpec, gdn: GatedDeltaNetSpec) -> int:
    resolved = gdn.resolve(spec)
    assert resolved.key_head_dim is not None and resolved.value_head_dim is not None
    key_dim, value_dim = spec.num_heads * resolved.key_head_dim, spec.num_heads * resolved.value_head_dim
    projections = spec.embed_dim * (2 * key_dim + 3 * value_dim + 2 * spec.num_heads)
    return projections + gdn.conv_size * (2 * key_dim + value_dim) + 2 * spec.num_heads + resolved.value_head_dim


def optimizer_bytes(component: Mapping[str, Any] | None, dtype: torch.dtype) -> float:
    """Bytes a parameter of an optimizer's state, by the name of its class.

    Args:
        component: ``_component_`` and its arguments; None is AdamW.
        dtype: Type of the weights, which moments of a name that is not known have too: two, as Adam's.

    Returns:
        float: 8 for AdamW on float32 weights, about 2 for AdamW8bit on any.
    """
    given = component or {}
    name = str(given.get("_component_", "AdamW")).rpartition(".")[2].lower()
    if name == "sgd":
        return dtype.itemsize if given.get("momentum") else 0
    moment = next((size for kind, size in _MOMENT_BYTES.items() if name.endswith(kind)), dtype.itemsize)
    return (3 if given.get("amsgrad") else 2) * moment


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of weights, gradients and optimizer state, each counted once; activations come on top.

    Args:
        teacher_parameters: Parameters of the teacher.
        student_parameters: Parameters of the student.
        mixer_parameters: Those of the student's Gated DeltaNet layers.
        teacher_bytes: Weights of the teacher.
        student_bytes: Weights of the student.
        alignment_bytes: Gradients and Adam moments while only the Gated DeltaNet layers are trained, float32.
        distillation_bytes: Gradients and optimizer state while the whole student is trained.
        float8_saving: What a float8 teacher takes less in a single process, which alone stores it in 8 bits.
    """

    teacher_parameters: int
    student_parameters: int
    mixer_parameters: int
    teacher_bytes: int
    student_bytes: int
    alignment_bytes: int
    distillation_bytes: int
    float8_saving: int = 0

    def of_process(self, stages: Iterable[str], *, processes: int, dp_replicate: int = 1) -> float:
        """Returns what the fullest of some stages takes in one process.

        Args:
            stages: Of the pipeline. The teacher is there in all of them; others than ``initialize``, ``align`` and
                ``distill`` have nothing else.
            processes: Number of processes.
            dp_replicate: Groups of them that each hold a copy of teacher and student, sharded within the group. Mixers
                outside of a student are whole in every process. Default: 1.

        Returns:
            float: Bytes.
        """
        shards = processes // dp_replicate
        teacher = (self.teacher_bytes - (self.float8_saving if processes == 1 else 0)) / shards
        mixers = self.mixer_parameters * torch.float32.itemsize
        beside = {
            "initialize": mixers,
            "align": mixers + self.alignment_bytes,
            "distill": (self.student_bytes + self.distillation_bytes) / shards,
        }
        return teacher + max((beside.get(stage, 0) for stage in stages), default=0)

    def summary(self) -> str:
        """Returns the estimate as one line for the log."""
        return (
            f"weights: teacher {self.teacher_parameters / 1e6:,.1f} M parameters, {self.teacher_bytes / GIB:.2f} GiB; "
            f"student {self.student_parameters / 1e6:,.1f} M ({self.mixer_parameters / 1e6:,.1f} M in Gated DeltaNet "
            f"layers), {self.student_bytes / GIB:.2f} GiB; gradients and optimizer state: alignment "
            f"{self.alignment_bytes / GIB:.2f} GiB, distillation {self.distillation_bytes / GIB:.2f} GiB; "
            "activations come on top"
        )


def estimate_memory(
    spec: DecoderSpec,
    *,
    retained_layers: Iterable[int],
    gdn: GdnConfig = None,
    teacher_dtype: torch.dtype = torch.bfloat16,
    student_dtype: torch.dtype = torch.float32,
    optimizer: Mapping[str, Any] | None = None,
    float8_teacher: bool = False,
) -> MemoryEstimate:
    """Estimates what teacher and student occupy, from the numbers alone.

    Args:
        spec: Numbers of the teacher.
        retained_layers: Layers that keep attention.
        gdn: Shape of the Gated DeltaNet layers. Default: None, the defaults of ``GatedDeltaNetSpec``.
        teacher_dtype: Type of the teacher's weights. Default: bfloat16.
        student_dtype: Type of the student's weights and gradients. Default: float32.
        optimizer: Of the distillation, as a config names it. Default: None, AdamW.
        float8_teacher: The teacher's layers compute in float8. Default: False.

    Returns:
        MemoryEstimate: The parts in bytes.
    """
    teacher, _ = count_parameters(spec)
    student, mixers = count_parameters(spec, retained_layers=retained_layers, gdn=gdn)
    gradient_and_moments = 3
    in_float8 = teacher - _embedding_parameters(spec) if float8_teacher else 0
    return MemoryEstimate(
        teacher_parameters=teacher,
        student_parameters=student,
        mixer_parameters=mixers,
        teacher_bytes=teacher * teacher_dtype.itemsize,
        student_bytes=student * student_dtype.itemsize,
        alignment_bytes=gradient_and_moments * mixers * torch.float32.itemsize,
        distillation_bytes=round(student * (student_dtype.itemsize + optimizer_bytes(optimizer, student_dtype))),
        float8_saving=in_float8 * (teacher_dtype.itemsize - 1),
    )
