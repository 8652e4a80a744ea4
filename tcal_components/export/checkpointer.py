"""Lets torchtune's full-finetune recipes read and write exported hybrids."""

from __future__ import annotations

import dataclasses
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torchtune import training

from tcal_components.export.config_json import DTYPES, ExportInfo
from tcal_components.export.folder import export_hybrid, whole_folder
from tcal_components.export.import_hybrid import import_hybrid, read_exported_folder
from tcal_components.precision.dtypes import parse_dtype

RECIPE_STATE_FILE = "recipe_state.pt"
_EPOCH = re.compile(r"epoch_(\d+)")


class HybridCheckpointer:
    """Checkpointer of an exported hybrid (config key ``checkpointer._component_``).

    Every epoch becomes a complete exported folder ``output_dir/epoch_N`` that transformers loads. While training goes
    on, the folder also holds optimizer and progress (``recipe_state.pt``): both get their name in one step, so that
    weights are never resumed with the state of another epoch. An epoch removes the states of the others.

    Args:
        checkpoint_dir: Exported folder to start from; tokenizer files are copied from it.
        output_dir: Where epochs are written; not inside ``checkpoint_dir``. None means that nothing is saved.
            Default: None.
        dtype: Type of the written weights, ``bf16`` or ``fp32``. Default: that of ``checkpoint_dir``.
        max_shard_size: Largest weight file. Default: ``5GB``.
        recipe_checkpoint: Recipe state to resume from, below ``output_dir``; the weights are those of its folder.
            Default: that of the last epoch that has one.
        should_load_recipe_state: Resume: weights and recipe state of an epoch in ``output_dir``. Recipes set this from
            ``resume_from_checkpoint``. Default: False.
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
        self._recipe_checkpoint = recipe_checkpoint
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
        if self._recipe_checkpoint is not None:
            state_file = output_dir / self._recipe_checkpoint
        else:
            state_file = max(self._states(), default=(0, output_dir / "epoch_N" / RECIPE_STATE_FILE))[1]
        if not state_file.is_file():
            raise FileNotFoundError(
                f"nothing to resume from: {state_file} does not exist; set resume_from_checkpoint to false to start anew"
            )
        weights = import_hybrid(state_file.parent).state_dict
        try:
            state = torch.load(state_file, map_location="cpu", weights_only=True)
        except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
            raise ValueError(f"{state_file} is damaged: {' '.join(str(error).split())[:200]}") from error
        return {training.MODEL_KEY: weights} | state

    def save_checkpoint(
        self,
        state_dict: dict[str, Any],
        epoch: int,
        intermediate_checkpoint: bool = False,
        adapter_only: bool = False,
    ) -> ExportInfo:
        """Writes ``epoch_N`` as an exported folder, with the recipe state while training goes on.

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
        layout, target = self._folder.layout, output_dir / f"epoch_{epoch}"
        for number, state_file in self._states():
            if number > epoch:  # of a run that was given up, or it would not have come to this epoch
                state_file.unlink()
        with whole_folder(target) as folder:
            info = export_hybrid(
                state_dict[training.MODEL_KEY],
                spec=layout.spec,
                gdn=layout.gdn,
                retained_layers=layout.retained_layers,
                teacher_dir=self._checkpoint_dir,
                output_dir=folder,
                dtype=self._dtype,
                format=self._folder.format,
                max_shard_size=self._max_shard_size,
                pad_values=layout.pad_values,
            )
            if intermediate_checkpoint:
                state = {key: value for key, value in state_dict.items() if key != training.MODEL_KEY}
                torch.save(state, folder / RECIPE_STATE_FILE)
        for number, state_file in self._states() if intermediate_checkpoint else ():
            if number < epoch:
                state_file.unlink()
        return dataclasses.replace(info, path=str(target))

    def _states(self) -> list[tuple[int, Path]]:
        """Recipe states in ``output_dir`` with the numbers of their epochs."""
        found = self._require_output_dir().glob(f"epoch_*/{RECIPE_STATE_FILE}")
        return [(int(match[1]), path) for path in found if (match := _EPOCH.fullmatch(path.parent.name))]

    def _require_output_dir(self) -> Path:
        if self._output_dir is None:
            raise ValueError("checkpointer.output_dir is not set; it is needed to save and to resume")
        return self._output_dir
