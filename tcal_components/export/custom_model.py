"""Adds its own modeling file to an exported folder (format ``hf_custom``)."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MODELING_FILE = "modeling_tcal_hybrid.py"


def add_custom_model(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Copies the modeling file into a folder and points its config at it.

    Args:
        folder: Folder that is being written.
        config: Content of config.json for the stock class.

    Returns:
        dict[str, Any]: Content of config.json for the class in the folder, loaded with ``trust_remote_code=True``.
    """
    shutil.copyfile(Path(__file__).with_name(MODELING_FILE), folder / MODELING_FILE)
    module = Path(MODELING_FILE).stem
    return dict(config) | {
        "model_type": "tcal_hybrid",
        "architectures": ["TcalHybridForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{module}.TcalHybridConfig",
            "AutoModelForCausalLM": f"{module}.TcalHybridForCausalLM",
        },
    }
