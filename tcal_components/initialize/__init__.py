"""How Gated DeltaNet layers start, without a gradient step."""
