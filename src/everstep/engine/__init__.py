"""Runs at work. Its rooms import one way: history ← code ← run ← process ← verbs ← app."""
