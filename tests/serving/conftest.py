"""Small exports of every family, and llama.cpp where it is installed."""

import os
import shutil
import sys
from dataclasses import replace

import pytest

from tcal_components.assets import asset_path
from tcal_components.export.folder import export_hybrid
from tcal_components.modules.spec import GatedDeltaNetSpec
from tcal_components.serving.llama_cpp_check import EngineMissing, find_engine
from tcal_components.serving.random_export import GDN, SPECS, random_hybrid


@pytest.fixture(scope="session")
def small_export(tmp_path_factory):
    """Exports a random hybrid of a family: ``small_export(family, retained_layers=..., pad_values=..., **changes)``."""

    def make(family, retained_layers=(0, 2), pad_values=True, max_shard_size="5GB", **changes):
        heads = {"num_heads": 3, "num_kv_heads": 1, "embed_dim": 192} if family == "smollm2" else {"embed_dim": 128}
        small = {"vocab_size": 2048, "num_layers": 4, "intermediate_dim": 192, **heads}
        spec = replace(SPECS[family], **small | changes)
        gdn = GDN.get(family, GatedDeltaNetSpec()).resolve(spec)
        student = random_hybrid(spec, retained_layers, gdn, seed=0)
        folder = tmp_path_factory.mktemp("exports") / family
        export_hybrid(
            student.state_dict(),
            spec=spec,
            gdn=gdn,
            retained_layers=retained_layers,
            teacher_dir=asset_path("quickstart"),
            output_dir=folder,
            max_shard_size=max_shard_size,
            pad_values=pad_values,
        )
        return folder

    return make


@pytest.fixture(scope="session")
def llama_cpp():
    """Where llama.cpp is (docs/serving.md says how to get it): arguments of ``check_llama_cpp``."""
    source, python = os.environ.get("LLAMA_CPP_SOURCE"), os.environ.get("LLAMA_CPP_PYTHON", sys.executable)
    try:
        find_engine(source, python)
    except EngineMissing as missing:
        pytest.skip(f"LLAMA_CPP_SOURCE and LLAMA_CPP_PYTHON give no usable llama.cpp: {missing}")
    assert shutil.which(python)
    return {"source": source, "python": python}
