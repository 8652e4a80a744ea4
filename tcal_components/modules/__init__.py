"""Modules: the Gated DeltaNet mixer, the attention of the retained layers and the hybrid decoder."""
