"""Witnesses: facts about the outside that a run remembers, and that are compared before it resumes.

For instance `await everstep.expect(everstep.witness.file("schema.sql"))`.
"""

from everstep.effects.witnesses import Witness, directory, env, file, http, sql, value

__all__ = ["Witness", "directory", "env", "file", "http", "sql", "value"]
