"""What is written about runs, and how it is believed. No code of a workflow is run here."""
