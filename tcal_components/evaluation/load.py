"""Models to evaluate: teachers, students of a run, exported folders, and random weights for measurements of speed."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import Tensor, nn

from tcal_components.checkpoint.teacher import load_teacher_state_dict
from tcal_components.config import ConfigError, Length, Settings, read_json_object
from tcal_components.export.stock_model import usable_kernels
from tcal_components.models import build_decoder, read_spec
from tcal_components.modules.mixer_parts import DecayParameters
from tcal_components.modules.spec import DecoderSpec
from tcal_components.precision.dtypes import refuse_overflow

_MIXER_KEY = "attn.g_proj.weight"  # only Gated DeltaNet layers have it


@dataclass(frozen=True)
class ModelSource(Settings):
    """Where a model comes from (an entry of the config keys ``teacher`` and ``students``); exactly one of three.

    Attributes:
        checkpoint_dir: The teacher's Hugging Face folder, loaded into our decoder; with ``weights`` a student of it.
        weights: ``mixers.safetensors`` of a run, or all weights of a student: a .safetensors file, or a folder of them.
        folder: Exported folder (or any checkpoint), loaded by plain transformers.
        component: Model builder called with its arguments, random weights: for speed and memory only.
        max_seq_len: Longest sequence of our decoders. Default: what the measurements need.
        trust_remote_code: Run the modeling file that a ``folder`` brings (``export.format: hf_custom``). Default: False.
    """

    checkpoint_dir: str | None = None
    weights: str | None = None
    folder: str | None = None
    component: dict[str, Any] | None = None
    max_seq_len: Length | None = None
    trust_remote_code: bool = False

    def check(self, where: str) -> None:
        """Raises one clear line for a source that cannot be loaded, before anything is loaded.

        Raises:
            ConfigError: For a combination of keys that says nothing or two things, or a folder whose code is not trusted.
            FileNotFoundError: For a path that does not exist.
        """
        kinds = [self.checkpoint_dir is not None, self.folder is not None, self.component is not None]
        if sum(kinds) != 1 or (self.weights is not None and self.checkpoint_dir is None):
            raise ConfigError(
                f"{where}: give either checkpoint_dir (with weights for a student), or folder (an export), or component "
                "(random weights)"
            )
        for key in ("checkpoint_dir", "weights", "folder"):
            value = getattr(self, key)
            if value is not None and not Path(value).exists():
                raise FileNotFoundError(f"{where}.{key}: {value} does not exist")
        if self.weights is not None:
            _weight_files(Path(self.weights))
        if self.folder is not None and _brings_code(Path(self.folder), where) and not self.trust_remote_code:
            raise ConfigError(
                f"{where}.folder: {self.folder} is loaded by a modeling file of its own (export.format hf_custom); "
                f"{where}.trust_remote_code=true allows it to run"
            )

    def describe(self) -> str:
        """For the report."""
        if self.component is not None:
            return f"random weights of {self.component.get('_component_')}"
        return str(self.weights or self.folder or self.checkpoint_dir)


def _brings_code(folder: Path, where: str) -> bool:
    """Whether transformers loads a folder by code that lies in it, because it has none of its own for that model."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{where}.folder: {folder} is no model folder (no config.json)")
    config = read_json_object(path)
    auto_map = config.get("auto_map")
    if not isinstance(auto_map, Mapping) or "AutoModelForCausalLM" not in auto_map:
        return False
    from transformers import CONFIG_MAPPING

    return str(config.get("model_type")) not in CONFIG_MAPPING


def _weight_files(path: Path) -> list[Path]:
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files or any(file.suffix != ".safetensors" for file in files):
        raise ValueError(f"student weights: expected a .safetensors file or a folder of them, got {path}")
    return files


def read_student_weights(path: str | Path) -> dict[str, Tensor]:
    """All tensors of a .safetensors file or of the files of a folder."""
    weights: dict[str, Tensor] = {}
    for file in _weight_files(Path(path)):
        part = load_file(file)
        if twice := weights.keys() & part.keys():
            raise ValueError(f"student weights: {min(twice)} is in {file} and in another file of {path}")
        weights.update(part)
    return weights


def student_shape(
    weights: Mapping[str, Tensor], spec: DecoderSpec, path: str | Path
) -> tuple[list[int], dict[str, int]]:
    """Reads the retained layers and the numbers of the Gated DeltaNet layers off a student's weights.

    Returns:
        tuple: Retained layers; ``conv_size``, ``key_head_dim`` and ``value_head_dim``.

    Raises:
        ValueError: If there is no Gated DeltaNet layer.
    """
    converted = sorted(int(key.split(".")[1]) for key in weights if key.endswith(_MIXER_KEY))
    if not converted:
        raise ValueError(f"student weights: {path} has no Gated DeltaNet layer (no key layers.N.{_MIXER_KEY})")
    prefix = f"layers.{converted[0]}.attn."
    heads = weights[prefix + "b_proj.weight"].shape[0]
    convolution = weights.get(prefix + "q_conv.weight")
    gdn = {
        "conv_size": 0 if convolution is None else convolution.shape[-1],
        "key_head_dim": weights[prefix + "q_proj.weight"].shape[0] // heads,
        "value_head_dim": weights[prefix + "v_proj.weight"].shape[0] // heads,
    }
    return [layer for layer in range(spec.num_layers) if layer not in converted], gdn


def load_model(source: ModelSource, *, device: torch.device, dtype: torch.dtype, min_seq_len: int = 0) -> nn.Module:
    """Loads a model for evaluation.

    Args:
        source: What to load.
        device: Where to put it.
        dtype: Type of the weights; the decay parameters of our Gated DeltaNet layers stay in float32.
        min_seq_len: Longest sequence that the measurements need.

    Returns:
        nn.Module: A HybridDecoder, or a transformers model for ``folder``; in evaluation mode.

    Raises:
        ValueError: If weights do not fit, or lie outside the range of ``dtype``.
    """
    if source.folder is not None:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(
            source.folder, dtype=dtype, trust_remote_code=source.trust_remote_code
        )
        return model.to(device).eval()
    if source.component is not None:
        from torchtune import config

        with device:
            return _finish(config.instantiate(OmegaConf.create(source.component)), device, dtype)
    assert source.checkpoint_dir is not None
    spec = read_spec(source.checkpoint_dir)
    spec = spec.with_max_seq_len(source.max_seq_len or max(spec.max_seq_len, min_seq_len))
    state = load_teacher_state_dict(source.checkpoint_dir, dtype=dtype)
    if source.weights is None:
        model = build_decoder(spec)
        model.load_state_dict(state)
        return _finish(model, device, dtype)
    weights = read_student_weights(source.weights)
    retained, gdn = student_shape(weights, spec, source.weights)
    model = build_decoder(spec, retained_layers=retained, gdn=gdn)
    expected = model.state_dict()
    merged = {key: weights.get(key, state.get(key)) for key in expected}
    wrong = [key for key, value in merged.items() if value is None or value.shape != expected[key].shape]
    unknown = [key for key in weights if key not in expected]
    if wrong or unknown:
        raise ValueError(
            f"student weights: {source.weights} does not fit the teacher {source.checkpoint_dir}: "
            f"{len(wrong)} missing or of another shape, {len(unknown)} unknown, first {(wrong + unknown)[0]}"
        )
    for key, value in weights.items():
        refuse_overflow(value, dtype, f"student weights: {key} of {source.weights}")
    model.load_state_dict(merged)
    return _finish(model, device, dtype)


def _finish(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    # In bf16 the decay would be off by up to 2 %, so its parameters are never rounded.
    decay = [module for module in model.modules() if isinstance(module, DecayParameters)]
    exact = {id(parameter) for module in decay for parameter in module.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in exact:
            parameter.data = parameter.data.to(dtype)
    return model.to(device).eval()


@contextlib.contextmanager
def exports_compute(device: torch.device, *models: Any) -> Iterator[None]:
    """Lets exported folders among the models compute on a CPU too, see ``usable_kernels``.

    Args:
        device: Where they compute.
        *models: To be evaluated; others than exports, and None, are left as they are.
    """
    with contextlib.ExitStack() as stack:
        for model in models:
            if any(cls.__name__ == "Qwen3_5ForCausalLM" for cls in type(model).__mro__):
                stack.enter_context(usable_kernels(model, device))
        yield


def free(device: torch.device) -> None:
    """Returns the memory of models that nobody holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
