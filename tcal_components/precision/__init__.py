"""Precision below bfloat16."""

from tcal_components.precision.float8 import RECIPES, Float8Layers, apply_float8, float8_problem, without_float8

__all__ = ["RECIPES", "Float8Layers", "apply_float8", "float8_problem", "without_float8"]
