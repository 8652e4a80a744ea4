"""Reads and checks configs: what a section may hold, and where a mistake is."""

from tcal_components.config.command_line import command_line, one_line_errors
from tcal_components.config.files import check_output_dir, read_json_object
from tcal_components.config.numbers import (
    Count,
    Length,
    Positive,
    Pulls,
    Rate,
    Seed,
    Share,
    Skipped,
    Steps,
    Tokens,
    WarmUp,
)
from tcal_components.config.parse import (
    STAGES,
    RunConfig,
    build,
    check_component,
    check_top_level,
    keys_of,
    read,
    resolve_assets,
    takes,
)
from tcal_components.config.schema import (
    ConfigError,
    OneOf,
    Range,
    Settings,
    check_keys,
    section,
)

__all__ = [
    "STAGES",
    "ConfigError",
    "Count",
    "Length",
    "OneOf",
    "Positive",
    "Pulls",
    "Range",
    "Rate",
    "RunConfig",
    "Seed",
    "Settings",
    "Share",
    "Skipped",
    "Steps",
    "Tokens",
    "WarmUp",
    "build",
    "check_component",
    "check_keys",
    "check_output_dir",
    "check_top_level",
    "command_line",
    "keys_of",
    "one_line_errors",
    "read",
    "read_json_object",
    "resolve_assets",
    "section",
    "takes",
]
