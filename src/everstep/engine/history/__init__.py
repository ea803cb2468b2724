"""Reading, verifying and describing histories. No workflow code runs here."""
