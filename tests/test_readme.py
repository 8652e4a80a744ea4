"""The README's Python runs as it stands."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README, COMPONENTS = ROOT / "README.md", ROOT / "docs" / "components.md"
BLOCKS = re.findall(r"```python\n(.*?)```", COMPONENTS.read_text(), flags=re.DOTALL)


def test_component_example(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (code,) = [block for block in BLOCKS if "initialize_mixers" in block]
    (tmp_path / "example.py").write_text(code)
    runpy.run_path(str(tmp_path / "example.py"))
    printed = capsys.readouterr().out.split(" ", 1)
    assert 30.0 < float(printed[0]) < 200.0, "perplexity of the aligned student on calibration text"


def test_nothing_was_left_open() -> None:
    assert "@@" not in README.read_text()
