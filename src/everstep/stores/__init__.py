"""Where runs are kept: one protocol, one conformance suite, several stores."""
