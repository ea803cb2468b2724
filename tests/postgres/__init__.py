"""What is particular to the PostgreSQL store: outages, unknown commits, liveness, load, and whole programs on it."""
