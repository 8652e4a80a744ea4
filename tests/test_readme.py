"""The README's Python runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


def test_component_example(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = [block for block in BLOCKS if "initialize_mixers" in block]
    exec(compile(code, str(README), "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out.split(" ", 1)
    assert 30.0 < float(printed[0]) < 200.0, "perplexity of the aligned student on calibration text"


def test_nothing_was_left_open() -> None:
    assert "@@" not in README.read_text()
