"""Workflow code: pure and deterministic. No I/O, no clock, no threads."""
