"""Checkpoints: teacher weights in, run state, Hugging Face export out."""
