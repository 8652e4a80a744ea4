"""Exports in engines: llama.cpp checked against transformers, vLLM's plugin and a benchmark of it."""
