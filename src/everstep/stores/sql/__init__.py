"""What the stores on SQL databases have in common: operations as named statements. Each store brings its own SQL."""
