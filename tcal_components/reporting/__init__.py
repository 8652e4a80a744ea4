"""What a run leaves for people: ``report.json``, ``report.md``, plots and the model card."""

from tcal_components.checkpoint.files import sanitize, write_json
from tcal_components.reporting.environment import StageClock, device_description, package_versions
from tcal_components.reporting.markdown import render_markdown, write_markdown
from tcal_components.reporting.model_card import render_model_card, teacher_license, write_model_card
from tcal_components.reporting.plots import write_plots
from tcal_components.reporting.report import Report, config_sha256, load_report, stage_result

__all__ = [
    "Report",
    "StageClock",
    "config_sha256",
    "device_description",
    "load_report",
    "package_versions",
    "render_markdown",
    "render_model_card",
    "sanitize",
    "stage_result",
    "teacher_license",
    "write_json",
    "write_markdown",
    "write_model_card",
    "write_plots",
]
