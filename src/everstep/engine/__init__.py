"""Runs at work: workflow code on a deterministic loop, drivers, the committer, recovery. Start reading at driver.py."""
