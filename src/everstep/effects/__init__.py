"""Steps: their contracts, their keys, and what their bodies may use."""
