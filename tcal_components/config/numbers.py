"""Numbers that many sections have.

The upper bounds lie far above any use: they catch a slip before it becomes memory or time.
"""

from __future__ import annotations

from typing import Annotated

from tcal_components.config.schema import Range

Count = Annotated[int, Range(1, 2**16)]  # sequences a batch, batches, examples, repeats
Steps = Annotated[int, Range(1, 10**9)]
Tokens = Annotated[int, Range(1, 10**14)]
WarmUp = Annotated[int, Range(0, 10**9)]  # steps
Skipped = Annotated[int, Range(0, 10**14)]  # tokens or documents
Length = Annotated[int, Range(2, 2**22)]  # tokens a sequence: the longest position of any published teacher
Rate = Annotated[float, Range(0, 100)]  # learning rates, weight decay
Share = Annotated[float, Range(0, 1)]
Positive = Annotated[float, Range(above=0, most=1e12)]
Pulls = Annotated[tuple[Annotated[float, Range(0, 1e12)], ...], Range(1, 100)]  # strengths to choose from
Seed = Annotated[int, Range(0, 2**32 - 1)]  # what numpy takes
