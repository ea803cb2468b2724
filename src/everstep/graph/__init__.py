"""Graphs: nodes with contracts and edges with conditions, scheduled durably. On top of workflows and their engine."""
