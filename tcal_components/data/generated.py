"""Text that a model wrote, on disk as documents, in a file that an interrupted run goes on with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tcal_components.checkpoint.artifact import Artifact
from tcal_components.checkpoint.files import writing
from tcal_components.config import ConfigError


class GeneratedText:
    """A .jsonl file with a line for each document, in their order; a text source as any other.

    Args:
        folder: Where it lies, as ``text.jsonl``; made if missing.
        inputs: All that decides what the documents are, as for :class:`~tcal_components.checkpoint.artifact.Artifact`.

    Attributes:
        path: Of the file.
        documents: Complete ones in it.
        tokens: Generated for them.

    Raises:
        ConfigError: The folder holds text that was made from something else.
    """

    def __init__(self, folder: str | Path, inputs: Mapping[str, Any]) -> None:
        self.path = Path(folder) / "text.jsonl"
        self.documents = self.tokens = 0
        marker = Artifact(Path(folder) / "made_of.json", inputs)
        if self.path.is_file() and not marker.current():
            why = f" ({changed})" if (changed := marker.why()) else ""
            raise ConfigError(
                f"{self.path} was written with another teacher, other prompts or settings{why}; remove it, or give this run "
                "another output_dir"
            )
        marker.save({})
        self._drop_half_a_line()

    def _drop_half_a_line(self) -> None:
        """What a kill left of a line goes; the rest is counted."""
        if not self.path.is_file():
            return
        with self.path.open("rb+") as file:
            whole = 0
            for line in file:
                if not line.endswith(b"\n"):
                    break
                whole += len(line)
                self.documents += 1
                self.tokens += json.loads(line)["tokens"]
            file.truncate(whole)

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Adds documents.

        Args:
            rows: Each with ``text``, and ``tokens`` that were generated for it.
        """
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        self.documents += len(rows)
        self.tokens += sum(row["tokens"] for row in rows)
