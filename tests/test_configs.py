"""Every config is well formed, and the full-size ones build on the meta device with the published parameter counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torchtune import config as torchtune_config

from tcal_components.align.config import AlignConfig
from tcal_components.config import section
from tcal_components.models import GatedDeltaNetSpec, count_parameters
from tcal_components.models.retained import RetainConfig, resolve_retained

CONFIGS = sorted((Path(__file__).resolve().parents[1] / "configs").glob("*.yaml"))
PUBLISHED = {
    "smollm2_135m": 134_515_008,
    "qwen2_5_1_5b": 1_543_714_304,
    "qwen2_5_3b": 3_085_938_688,
    "llama3_2_3b": 3_212_749_824,
    "qwen3_8b": 8_190_735_360,
}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_well_formed(path: Path) -> None:
    cfg = OmegaConf.load(path)
    for key in [key for key in cfg if OmegaConf.is_missing(cfg, key)]:  # what the launch line has to give
        assert f"{key}=" in path.read_text()
        cfg[key] = "given"
    torchtune_config.validate(cfg)
    first = path.read_text().splitlines()[0]
    assert first.startswith("# "), "a config opens with what it is for"
    assert f"--config configs/{path.name}" in path.read_text(), "and with its launch line"


@pytest.mark.parametrize("name", PUBLISHED)
def test_full_size_builds_on_meta(name: str) -> None:
    cfg = OmegaConf.load(next(path for path in CONFIGS if path.stem == name))
    section(AlignConfig, cfg.align, "align")
    with torch.device("meta"):
        teacher = torchtune_config.instantiate(cfg.teacher_model)
        retained = resolve_retained(section(RetainConfig, cfg.retain, "retain"), teacher.spec.num_layers)
        student = torchtune_config.instantiate(cfg.model, retained_layers=list(retained))
    assert sum(p.numel() for p in teacher.parameters()) == PUBLISHED[name]
    gdn = GatedDeltaNetSpec.from_config(cfg.model.gdn)
    assert (
        sum(p.numel() for p in student.parameters())
        == count_parameters(teacher.spec, retained_layers=retained, gdn=gdn)[0]
    )
    assert student.retained_layers == retained and len(retained) * 4 in range(
        teacher.spec.num_layers - 3, teacher.spec.num_layers + 4
    )
