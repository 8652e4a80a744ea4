"""Brings each converted layer to the output of the attention that it replaces."""
