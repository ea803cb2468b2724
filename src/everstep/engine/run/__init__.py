"""One run, driven: from its claim to its rest or end."""
