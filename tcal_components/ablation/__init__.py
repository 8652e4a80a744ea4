"""Starts compared: tables over seeds, recovery by distillation."""
