"""The store on PostgreSQL, by psycopg 3."""

from everstep.stores.postgres.store import PostgresStore

__all__ = ["PostgresStore"]
