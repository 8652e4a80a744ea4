"""Lets torchtune's full-finetune recipes read and write exported hybrids."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torchtune import training

from tcal_components.checkpoint.export import export_hybrid
from tcal_components.checkpoint.export_config import DTYPES, ExportInfo
from tcal_components.checkpoint.import_hybrid import import_hybrid, read_exported_folder
from tcal_components.precision.dtypes import parse_dtype

RECIPE_STATE_FILE = Path("recipe_state") / "recipe_state.pt"
_EPOCH = re.compile(r"epoch_(\d+)")


class HybridCheckpointer:
    """Checkpointer of an exported hybrid (config key ``checkpointer._component_``).

    Every epoch becomes a complete exported folder ``output_dir/epoch_N`` that transformers loads; all but the last
    epoch also write optimizer and progress to ``output_dir/recipe_state``.

    Args:
        checkpoint_dir: Exported folder to start from; tokenizer files are copied from it.
        output_dir: Where epochs are written; not inside ``checkpoint_dir``. None means that nothing is saved.
            Default: None.
        dtype: Type of the written weights, ``bf16`` or ``fp32``. Default: that of ``checkpoint_dir``.
        max_shard_size: Largest weight file. Default: ``5GB``.
        recipe_checkpoint: Recipe state to resume from. Default: that in ``output_dir``.
        should_load_recipe_state: Resume: weights of the last epoch in ``output_dir``, and the recipe state.
            Recipes set this from ``resume_from_checkpoint``. Default: False.
        checkpoint_files: Not used (the folder's index names its files); there because configs of other checkpointers
            have it.
        model_type: Not used; torchtune's recipes read the config key when activation checkpointing is on, so give it
            any value there.

    Raises:
        FileNotFoundError: If ``checkpoint_dir`` is not complete, or nothing to resume from is there.
        ValueError: If ``checkpoint_dir`` is not an export, or ``output_dir`` lies inside it.
    """

    def __init__(
        self,
        checkpoint_dir: str | Path,
        *,
        output_dir: str | Path | None = None,
        dtype: str | None = None,
        max_shard_size: str | int = "5GB",
        recipe_checkpoint: str | Path | None = None,
        should_load_recipe_state: bool = False,
        checkpoint_files: Any = None,
        model_type: str | None = None,
    ) -> None:
        # These two names are read by torchtune's recipes.
        self._checkpoint_dir = Path(checkpoint_dir)
        self._output_dir = Path(output_dir) if output_dir is not None else None
        self._folder = read_exported_folder(self._checkpoint_dir)
        self._dtype = self._folder.dtype if dtype is None else parse_dtype(dtype, "checkpointer.dtype")
        assert self._dtype in DTYPES
        self._max_shard_size = max_shard_size
        self._should_load_recipe_state = should_load_recipe_state
        self._recipe_checkpoint = Path(recipe_checkpoint) if recipe_checkpoint is not None else None
        if self._output_dir is not None:
            inside = self._output_dir.resolve()
            if self._checkpoint_dir.resolve() in (inside, *inside.parents):
                raise ValueError(
                    f"checkpointer.output_dir {self._output_dir} lies in checkpoint_dir {self._checkpoint_dir}; "
                    "name another folder"
                )

    def load_checkpoint(self) -> dict[str, Any]:
        """Reads the weights and, when resuming, the recipe state.

        Returns:
            dict[str, Any]: ``{"model": state dict with torchtune names}`` and the entries of the recipe state.

        Raises:
            FileNotFoundError: If there is nothing to resume from.
            ValueError: If the folder is damaged.
        """
        if not self._should_load_recipe_state:
            return {training.MODEL_KEY: import_hybrid(self._checkpoint_dir).state_dict}
        output_dir = self._require_output_dir()
        epochs = [
            (int(match[1]), path)
            for path in (output_dir.iterdir() if output_dir.is_dir() else ())
            if (match := _EPOCH.fullmatch(path.name))
        ]
        recipe_state = self._recipe_checkpoint or output_dir / RECIPE_STATE_FILE
        if not epochs or not recipe_state.is_file():
            raise FileNotFoundError(
                f"nothing to resume from: {output_dir} needs a folder epoch_N and {recipe_state} must exist; "
                "set resume_from_checkpoint to false to start anew"
            )
        state = torch.load(recipe_state, map_location="cpu", weights_only=True)
        return {training.MODEL_KEY: import_hybrid(max(epochs)[1]).state_dict} | state

    def save_checkpoint(
        self,
        state_dict: dict[str, Any],
        epoch: int,
        intermediate_checkpoint: bool = False,
        adapter_only: bool = False,
    ) -> ExportInfo:
        """Writes ``epoch_N`` as an exported folder, and the recipe state while training goes on.

        Args:
            state_dict: ``{"model": complete weights}`` and, for an intermediate checkpoint, the recipe state.
            epoch: N.
            intermediate_checkpoint: Whether training goes on after it. Default: False.
            adapter_only: Not possible: these are full-parameter checkpoints. Default: False.

        Returns:
            ExportInfo: What was written.

        Raises:
            ValueError: For ``adapter_only``, without an ``output_dir``, or if the weights do not fit.
        """
        if adapter_only:
            raise ValueError("an exported hybrid has no adapters; use a full-finetune recipe")
        output_dir = self._require_output_dir()
        layout = self._folder.layout
        info = export_hybrid(
            state_dict[training.MODEL_KEY],
            spec=layout.spec,
            gdn=layout.gdn,
            retained_layers=layout.retained_layers,
            teacher_dir=self._checkpoint_dir,
            output_dir=output_dir / f"epoch_{epoch}",
            dtype=self._dtype,
            format=self._folder.format,
            max_shard_size=self._max_shard_size,
        )
        if intermediate_checkpoint:
            path = output_dir / RECIPE_STATE_FILE
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(".tmp")
            torch.save({key: value for key, value in state_dict.items() if key != training.MODEL_KEY}, unfinished)
            unfinished.replace(path)
        return info

    def _require_output_dir(self) -> Path:
        if self._output_dir is None:
            raise ValueError("checkpointer.output_dir is not set; it is needed to save and to resume")
        return self._output_dir
