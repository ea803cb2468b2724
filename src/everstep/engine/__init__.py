"""Runs at work. Its packages import in one direction: history ← code ← run ← process ← verbs ← app."""
