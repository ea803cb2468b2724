"""A shop on PostgreSQL: a schema with its sales and its markers, and a store beside it."""

import asyncio
from typing import Any

import everstep
from everstep.effects import atomic
from tests.postgres.server import Server
from tests.postgres.ways import WAYS, Way


class Shop:
    """Unqualified names mean the shop's schema, in whatever way one gets there."""

    def __init__(self, server: Server, schema: str) -> None:
        self.server, self.schema = server, schema
        server.ask(f'CREATE SCHEMA "{schema}"')
        server.ask(f'CREATE TABLE "{schema}".sales (key text, item text)')
        self.kinds: list[str] = []
        """The events of the last run that are about steps."""

    def url(self, uri: str = "") -> str:
        """Return the URL of the shop's database, with the schema of its markers."""
        uri = uri or self.server.uri
        return f"{uri}{'&' if '?' in uri else '?'}options=-csearch_path%3D{self.schema}&schema={self.schema}"

    def store_url(self, uri: str = "") -> str:
        """Return the URL of a store on the same server."""
        return f"{self.url(uri)}_store"

    def drop(self) -> None:
        self.server.drop(self.schema)
        self.server.drop(f"{self.schema}_store")

    def sales(self) -> list[str]:
        """Return what was sold: an account that is not the engine's."""
        return [item for (item,) in self.server.ask(f'SELECT item FROM "{self.schema}".sales')]

    def markers(self, way: Way) -> list[Any]:
        """Return the markers: attempt, outcome, guard."""
        schema = f"{self.schema}_store" if way.in_store else self.schema
        if not self.server.ask(
            "SELECT 1 FROM pg_tables WHERE schemaname = %s AND tablename = 'everstep_markers'", schema
        ):
            return []
        return self.server.ask(f'SELECT attempt, outcome, guard FROM "{schema}".everstep_markers')

    def run(self, way: Way | str, flow: Any, *, uri: str = "", id: str = "r") -> Any:
        """Run a workflow: on a store beside the shop if the way leads through it, otherwise on one in memory."""
        way = WAYS[way] if isinstance(way, str) else way
        return asyncio.run(self._run(self.store_url(uri) if way.in_store else "memory:", flow, id))

    async def _run(self, url: str, flow: Any, id: str) -> Any:
        async with everstep.open(url) as app:
            try:
                return await app.run(flow, id=id)
            finally:
                events = app.store.events(id, 1)
                self.kinds = [event.kind for event in events if event.kind.startswith(("step_", "attempt_"))]


class Kept:
    """Lets a step remember what its attempts are made of, so that a test can make one more."""

    def __init__(self, step: Any) -> None:
        self.works: list[atomic.Work] = []
        work_of = step.work

        def kept(*args: Any, **more: Any) -> atomic.Work:
            self.works.append(work_of(*args, **more))
            return self.works[-1]

        step.work = kept
