"""Text for runs of hours from a corpus of licensed documents, in parts that share none: ``own_text.py CORPUS FOLDER``.

CORPUS has train.jsonl, calib.jsonl, heldout_in.jsonl (other documents of the same sources) and heldout_ood.jsonl (sources that
are in no other part), each line with ``text``. FOLDER gets train.jsonl, calib.jsonl, own.jsonl and other.jsonl: documents in
pieces of at most 16 000 characters, in a random order that depends on nothing but the documents, cut to the sizes below.
"""

import json
import random
import sys
from pathlib import Path

PIECE = 16_000
SIZES = {"train": 46_000_000, "calib": 1_600_000, "own": 1_400_000, "other": 1_000_000}  # characters
SOURCES = {"train": "train", "calib": "calib", "own": "heldout_in", "other": "heldout_ood"}


def main(corpus: Path, folder: Path) -> None:
    """Writes the four files."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, source in SOURCES.items():
        lines = (corpus / f"{source}.jsonl").read_text(encoding="utf-8").splitlines()
        texts = (json.loads(line)["text"] for line in lines)
        # No document fills a part: of a book the first six pieces.
        pieces = [text[at : at + PIECE] for text in texts for at in range(0, min(len(text), 6 * PIECE), PIECE)]
        random.Random(0).shuffle(pieces)
        size = 0
        with (folder / f"{part}.jsonl").open("w", encoding="utf-8") as file:
            for piece in pieces:
                file.write(json.dumps({"text": piece}, ensure_ascii=False) + "\n")
                size += len(piece)
                if size >= SIZES[part]:
                    break
        print(part, size, "characters")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
