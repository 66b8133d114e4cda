"""Readers of quantised checkpoints' formats."""
