"""Reads an exported hybrid back: specification, weights and model, so that it can be distilled or fine-tuned further."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from tcal_components.checkpoint.teacher import check_headers, check_tied_head, locate_tensors, open_safetensors
from tcal_components.config import read_json
from tcal_components.export.config_json import FORMATS, export_layout
from tcal_components.export.folder import NORM_RECORDS_FILE
from tcal_components.export.layout import (
    CONV_SIZE,
    MIXER_PROJECTIONS,
    MLP_NAMES,
    HybridLayout,
    exported_shapes,
    student_shapes,
)
from tcal_components.export.norms import constant_dimension, join_norm, unpack_factors, unpack_floats
from tcal_components.models._decoder import build_decoder
from tcal_components.modules.hybrid_decoder import HybridDecoder
from tcal_components.modules.spec import ROPE_SCALING_KEYS, DecoderSpec, GatedDeltaNetSpec
from tcal_components.precision.dtypes import is_finite, refuse_overflow


class ImportedHybrid(NamedTuple):
    """An exported folder, read back.

    Args:
        state_dict: Student weights by torchtune name: projections in the type of the files, norms and decay float32.
        spec: Numbers of the teacher.
        gdn: Shape of the Gated DeltaNet layers.
        retained_layers: Layers that keep attention.
    """

    state_dict: dict[str, torch.Tensor]
    spec: DecoderSpec
    gdn: GatedDeltaNetSpec
    retained_layers: tuple[int, ...]


class ExportedFolder(NamedTuple):
    """What config.json of an exported folder says.

    Args:
        layout: What the student is.
        format: The folder's export format.
        dtype: Type of its weights.
    """

    layout: HybridLayout
    format: str
    dtype: torch.dtype


def read_exported_folder(checkpoint_dir: str | Path) -> ExportedFolder:
    """Reads config.json of an exported folder.

    Raises:
        FileNotFoundError: If there is no config.json.
        ValueError: If it was not written by an export of this project.
    """
    path = Path(checkpoint_dir) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; an exported hybrid is needed")
    config = read_json(path)
    ours = config.get("tcal")
    if not isinstance(ours, dict) or ours.get("format") not in FORMATS:
        raise ValueError(f"{path} has no key 'tcal' of an export; only folders written by the export stage can be read")
    try:
        rope = config.get("rope_parameters") or config["rope_scaling"]
        spec = DecoderSpec(
            family=ours["family"],
            vocab_size=config["vocab_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            embed_dim=config["hidden_size"],
            intermediate_dim=config["intermediate_size"],
            head_dim=ours["head_dim"],
            max_seq_len=config["max_position_embeddings"],
            norm_eps=config["rms_norm_eps"],
            rope_base=rope["rope_theta"],
            rope_scaling={key: rope[key] for key in ROPE_SCALING_KEYS} if rope["rope_type"] == "llama3" else None,
            qkv_bias=ours["qkv_bias"],
            qk_norm=ours["qk_norm"],
            tie_word_embeddings=config["tie_word_embeddings"],
        )
        gdn = GatedDeltaNetSpec(
            conv_size=ours["conv_size"],
            key_head_dim=config["linear_key_head_dim"],
            value_head_dim=ours.get("value_head_dim", config["linear_value_head_dim"]),
        )
        kept = [index for index, kind in enumerate(config["layer_types"]) if kind == "full_attention"]
        dtype = getattr(torch, config.get("dtype") or config["torch_dtype"])
    except KeyError as error:
        raise ValueError(f"{path} lacks the key {error}, which every export writes") from error
    options = {"format": ours["format"], "pad_values": config["linear_value_head_dim"] != gdn.value_head_dim}
    layout = export_layout(spec, gdn=gdn, retained_layers=kept, dtype=dtype, **options)
    return ExportedFolder(layout, ours["format"], dtype)


def import_hybrid(checkpoint_dir: str | Path, *, dtype: torch.dtype | None = None) -> ImportedHybrid:
    """Reads an exported hybrid.

    The inverse of ``export_hybrid``: from a float32 export the student's weights come back bit for bit, from a
    bfloat16 export those that export to the same files again.

    Args:
        checkpoint_dir: The exported folder. It may since have been trained with transformers, as long as the
            constructed parts of its retained attention (gate rows, and constants for teachers without q/k norm) were
            not changed.
        dtype: Type to convert everything to. Default: None, projections as stored, norms and decay float32.

    Returns:
        ImportedHybrid: state_dict, spec, gdn and retained_layers.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If the folder is not an export, is damaged, or its attention is no longer a student's.
    """
    layout, _, _ = read_exported_folder(checkpoint_dir)
    reader = _Reader(Path(checkpoint_dir), layout)
    state_dict = reader.state_dict()
    if dtype is not None:
        for key, value in state_dict.items():
            refuse_overflow(value, dtype, f"{checkpoint_dir}: {key}")
            state_dict[key] = value.to(dtype)
    return ImportedHybrid(state_dict, layout.spec, layout.gdn, layout.retained_layers)


def hybrid_from_export(*, checkpoint_dir: str | Path, max_seq_len: int | None = None) -> HybridDecoder:
    """Builds the hybrid of an exported folder with freshly initialised weights (config key ``model._component_``).

    Args:
        checkpoint_dir: The exported folder.
        max_seq_len: Longest sequence in tokens. Default: the folder's.

    Returns:
        HybridDecoder: The model; ``HybridCheckpointer`` reads its weights.

    Raises:
        FileNotFoundError: If there is no config.json.
        ValueError: If the folder is not an export.
    """
    layout, _, _ = read_exported_folder(checkpoint_dir)
    return build_decoder(
        layout.spec.with_max_seq_len(max_seq_len), retained_layers=layout.retained_layers, gdn=layout.gdn
    )


class _Reader:
    """Undoes the weight export, one tensor at a time."""

    def __init__(self, folder: Path, layout: HybridLayout) -> None:
        self._folder = folder
        self._layout = layout
        self._location = locate_tensors(folder)
        self._files: dict[Path, Any] = {path: open_safetensors(path) for path in sorted(set(self._location.values()))}
        shapes = exported_shapes(layout)
        # Exports have not always held the zeros of the output projection's bias.
        optional = {name for name in shapes if name.endswith(".o_proj.bias")}
        if layout.spec.tie_word_embeddings:
            optional.add("lm_head.weight")
        model = f"a {layout.spec.family} hybrid with the layers of its config.json"
        check_headers(folder, self._location, shapes, optional=optional, model=model)
        if layout.spec.tie_word_embeddings:
            check_tied_head(folder, self._location)
        self._norm_records: dict[str, dict[str, str]] = read_json(folder / NORM_RECORDS_FILE)

    def state_dict(self) -> dict[str, torch.Tensor]:
        spec = self._layout.spec
        found = {"tok_embeddings.weight": self._get("model.embed_tokens.weight")}
        for index in range(spec.num_layers):
            source, target = f"model.layers.{index}.", f"layers.{index}."
            found[f"{target}sa_norm.scale"], factor = self._norm(f"{source}input_layernorm.weight")
            if index in self._layout.retained_layers:
                attn = self._attention(f"{source}self_attn.", factor)
            else:
                attn = self._mixer(f"{source}linear_attn.", factor)
            found |= {f"{target}attn.{name}": value for name, value in attn.items()}
            found[f"{target}mlp_norm.scale"], factor = self._norm(f"{source}post_attention_layernorm.weight")
            for name, exported in MLP_NAMES.items():
                columns = factor if name != "w2" else None
                found[f"{target}mlp.{name}.weight"] = self._get(f"{source}mlp.{exported}.weight", columns)
        found["norm.scale"], factor = self._norm("model.norm.weight")
        if not spec.tie_word_embeddings:
            found["output.weight"] = self._get("lm_head.weight", factor)
        for key, value in found.items():
            if not is_finite(value):
                raise ValueError(
                    f"{self._folder} holds NaN, infinity or values outside the range of {value.dtype} in {key}"
                )
        return {key: found[key].contiguous() for key in student_shapes(self._layout)}

    def _get(self, name: str, columns: torch.Tensor | None = None) -> torch.Tensor:
        value = self._files[self._location[name]].get_tensor(name)
        if value.dtype == torch.float64:
            value = value.float()
        return value if columns is None else value / columns.to(value.dtype)

    def _norm(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        stored, record = self._get(name), self._norm_records.get(name, {})
        factor = unpack_factors(record["factors"]) if "factors" in record else None
        weight = join_norm(stored, factor)
        if "exact" in record:
            # Only while the file still holds what the exact weights round to: it may have been trained since.
            exact = unpack_floats(record["exact"])
            weight = torch.where(exact / (1.0 if factor is None else factor) - 1.0 == stored, exact, weight)
        return weight, factor

    def _attention(self, source: str, columns: torch.Tensor | None) -> dict[str, torch.Tensor]:
        spec, size = self._layout.spec, self._layout.exported_head_dim
        attn: dict[str, torch.Tensor] = {}
        rest, constants = list[torch.Tensor](), list[torch.Tensor]()  # of the rest the export made zeros
        for name in ("q", "k", "v"):
            rows = size * (2 if name == "q" else 1)
            weight = self._get(f"{source}{name}_proj.weight", columns).unflatten(0, (-1, rows))
            attn[f"{name}_proj.weight"] = weight[:, : spec.head_dim].flatten(0, 1)
            rest.append(weight[:, spec.head_dim :])
            if self._layout.exported_bias:
                bias = self._get(f"{source}{name}_proj.bias").unflatten(0, (-1, rows)).clone()
                if spec.qkv_bias:
                    # A copy: with one key/value head, flatten() is a view of what becomes zero in the next line.
                    attn[f"{name}_proj.bias"] = bias[:, : spec.head_dim].flatten().clone()
                    bias[:, : spec.head_dim] = 0.0
                if self._layout.scale_by_norm and name != "v":
                    constants.append(bias[:, spec.head_dim].clone())
                    bias[:, spec.head_dim] = 0.0
                rest.append(bias)
        if f"{source}o_proj.bias" in self._location:
            rest.append(self._get(f"{source}o_proj.bias"))
        weight = self._get(f"{source}o_proj.weight").unflatten(1, (-1, size)) / 2.0
        attn["output_proj.weight"] = weight[..., : spec.head_dim].flatten(1)
        # Columns for the enlarged half of a head read zeros, so training cannot have given them a meaning.
        for name in ("q", "k"):
            if not self._layout.scale_by_norm:
                if spec.qk_norm:
                    attn[f"{name}_norm.scale"] = self._norm(f"{source}{name}_norm.weight")[0]
                continue
            norm = join_norm(self._get(f"{source}{name}_norm.weight"), None)
            rest.append(norm[spec.head_dim :])
            constants.append(norm[: spec.head_dim])
        if any(bool(value.any()) for value in rest) or not self._constants_hold(constants):
            raise ValueError(
                f"{self._folder}: {source}* no longer has the form that the export gave it (gate rows and output "
                "bias zero, constants of the q/k norm); training in transformers must leave those alone for a student to be read back"
            )
        return attn

    def _constants_hold(self, found: list[torch.Tensor]) -> bool:
        if not found:
            return True
        numbers = constant_dimension(self._layout.spec.head_dim)
        expected = (numbers.q_bias, numbers.k_bias, numbers.q_weight, numbers.k_weight)
        return all(bool((value == number).all()) for value, number in zip(found, expected))

    def _mixer(self, source: str, columns: torch.Tensor | None) -> dict[str, torch.Tensor]:
        spec, gdn = self._layout.spec, self._layout.gdn
        assert gdn.key_head_dim is not None and gdn.value_head_dim is not None
        sizes = [spec.num_heads * gdn.key_head_dim] * 2 + [spec.num_heads * self._layout.exported_value_dim]
        qkv = self._get(f"{source}in_proj_qkv.weight", columns)
        taps = self._get(f"{source}conv1d.weight")
        q, k, v = qkv.split(sizes)
        z, b, a = (self._get(f"{source}in_proj_{letter}.weight", columns) for letter in "zba")
        v, z = self._value_heads(f"{source}v", v, copied=True), self._value_heads(f"{source}z", z)
        values = [q, k, v, z, b, a]
        attn = {f"{name}.weight": value for name, value in zip(MIXER_PROJECTIONS, values)}
        identity = taps.new_tensor([0.0] * (CONV_SIZE - 1) + [1.0])
        added = taps[..., : CONV_SIZE - gdn.conv_size] if gdn.conv_size else taps - identity
        if bool(added.any()):
            raise ValueError(
                f"{self._folder}: {source}conv1d has taps that a student with conv_size {gdn.conv_size} does not have; "
                f"set conv_size in config.json's key 'tcal' to {CONV_SIZE} to keep them"
            )
        if gdn.conv_size:
            q, k, v = taps[..., CONV_SIZE - gdn.conv_size :].split(sizes)
            v = self._value_heads(f"{source}conv1d", v, copied=True)
            attn |= {"q_conv.weight": q, "k_conv.weight": k, "v_conv.weight": v}
        out = self._get(f"{source}out_proj.weight")
        attn["output_proj.weight"] = self._value_heads(f"{source}out_proj", out.T).T
        attn["decay.A_log"] = self._get(f"{source}A_log").float()
        attn["decay.dt_bias"] = self._get(f"{source}dt_bias").float()
        attn["o_norm.scale"] = self._get(f"{source}norm.weight")[: gdn.value_head_dim]
        return attn

    def _value_heads(self, name: str, rows: torch.Tensor, *, copied: bool = False) -> torch.Tensor:
        """The student's part [H V, ...] of value heads that the export enlarged."""
        copies = self._layout.value_copies
        size = self._layout.exported_value_dim // copies
        first, *more = rows.unflatten(0, (self._layout.spec.num_heads, -1)).split(size, dim=1)
        if not all(torch.equal(part, first if copied else torch.zeros_like(first)) for part in more):
            raise ValueError(
                f"{self._folder}: {name} no longer holds the student's value heads {copies} times over (copied or zero); "
                f"set value_head_dim in config.json's key 'tcal' to {size * copies} to read all of it"
            )
        return first.flatten(0, 1)
