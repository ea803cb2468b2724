"""What is true: events, run states and their arrows, contracts, retry, digests. Pure: no I/O, no clock, no threads."""
