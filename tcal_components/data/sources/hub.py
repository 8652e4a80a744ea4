"""Documents of a Hugging Face dataset, on the hub or saved in a folder."""

from collections.abc import Iterator
from pathlib import Path

from tcal_components.assets import resolve
from tcal_components.data.sources.readers import Document, each_row, first_line, new_document, require_column, text_of


def read_hub(
    source: str, *, subset: str | None, split: str | None, text_column: str, streaming: bool
) -> Iterator[Document]:
    """Documents of a Hugging Face dataset, by name or from a folder written by ``save_to_disk``.

    Raises:
        ValueError: if it cannot be loaded, or has no such split or text column.
    """
    import datasets

    saved = resolve(source).is_dir()
    try:
        if saved:
            data = datasets.load_from_disk(str(resolve(source)))
            if isinstance(data, datasets.DatasetDict):
                data = data[split or "train"]
        else:
            data = datasets.load_dataset(source, subset, split=split or "train", streaming=streaming)
    except Exception as error:  # datasets raises many kinds: no such name, no network, no such split, no such subset
        reason = first_line(error)
        if saved:
            raise ValueError(
                f"{source} cannot be read as a saved dataset (split {split or 'train'}): {reason}"
            ) from error
        raise ValueError(
            f"source {source!r} is no file or folder here, and loading it as a Hugging Face dataset "
            f"(subset {subset}, split {split or 'train'}) failed: {reason}"
        ) from error
    columns = getattr(data, "column_names", None)
    if columns:
        require_column(text_column, list(columns), source)
        data = data.select_columns([text_column])
    for where, item in each_row(data, source):
        document = new_document(where, text_of(item, text_column, where))
        if not document.is_blank():
            yield document


def hub_commit(source: str, subset: str | None, revision: str | None) -> str:
    """Which state of a Hugging Face dataset would be read: the hub's newest, or without a network the one that is here.

    Raises:
        ValueError: neither can be told.
    """
    import datasets

    try:
        return str(datasets.load_dataset_builder(source, subset, revision=revision).hash)
    except Exception as error:  # as in :func:`read_hub`
        raise ValueError(f"{source}: {first_line(error)}") from error


def is_saved_dataset(path: Path) -> bool:
    """Whether the folder was written by ``datasets.Dataset.save_to_disk``."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()
