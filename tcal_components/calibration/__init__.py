"""Measuring a teacher's attention, starting Gated DeltaNet layers from it, and aligning them layer by layer."""
