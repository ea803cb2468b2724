"""Runs at work: workflow code on a deterministic loop, drivers, the committer, recovery. The rooms: history ← code ← run ← process ← verbs ← app.
