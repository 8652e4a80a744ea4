"""Measurements of teacher and student side by side."""

from tcal_components.evaluation.perplexity import (
    PerplexityResult,
    evaluation_batches,
    perplexity,
    perplexity_by_context,
)

__all__ = ["PerplexityResult", "evaluation_batches", "perplexity", "perplexity_by_context"]
