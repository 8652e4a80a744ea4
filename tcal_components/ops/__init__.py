"""Primitives: the gated delta rule, the short convolution and document boundaries. They know nothing of recipes."""

from tcal_components.ops.check import check_gdn_backend
from tcal_components.ops.documents import Documents, document_boundaries, documents_from_starts
from tcal_components.ops.gated_delta_rule import chunked_gated_delta_rule, gated_delta_rule, gated_delta_rule_step
from tcal_components.ops.gated_norm import gated_rms_norm
from tcal_components.ops.short_conv import short_conv, short_conv_step

__all__ = [
    "Documents",
    "check_gdn_backend",
    "chunked_gated_delta_rule",
    "document_boundaries",
    "documents_from_starts",
    "gated_delta_rule",
    "gated_delta_rule_step",
    "gated_rms_norm",
    "short_conv",
    "short_conv_step",
]
