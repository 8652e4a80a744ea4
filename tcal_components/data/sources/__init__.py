"""Documents of a text source, one at a time and in a fixed order: files, folders, Hugging Face datasets."""

from tcal_components.data.sources.files import (
    TEXT_SUFFIXES,
    TOKEN_SUFFIX,
    find_files,
    is_local,
    read_files,
    read_token_array,
    require_file,
    shuffled,
)
from tcal_components.data.sources.hub import hub_commit, is_saved_dataset, read_hub
from tcal_components.data.sources.readers import Document, first_line

__all__ = [
    "TEXT_SUFFIXES",
    "TOKEN_SUFFIX",
    "Document",
    "find_files",
    "first_line",
    "hub_commit",
    "is_local",
    "is_saved_dataset",
    "read_files",
    "read_hub",
    "read_token_array",
    "require_file",
    "shuffled",
]
