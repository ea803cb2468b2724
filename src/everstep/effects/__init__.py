"""Contracts at work: steps, their keys and what their bodies may ask for."""
