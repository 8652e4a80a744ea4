"""Loads ``tiny.py`` by its path: test folders are no packages."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny():
    spec = importlib.util.spec_from_file_location("tiny_distillation", Path(__file__).parent / "tiny.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
