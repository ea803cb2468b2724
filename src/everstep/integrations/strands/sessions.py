"""A session manager for Strands on an Everstep store: SQLite or PostgreSQL.

A session is a run that takes requests to write. So each write is durable when it returns, in a history with digests; of
two processes with one session only one drives it, and both see the same. Messages are a stream of the run, all else is
published by it.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from strands.session.repository_session_manager import RepositorySessionManager
from strands.session.session_repository import SessionRepository
from strands.types.exceptions import SessionException
from strands.types.session import Session, SessionAgent, SessionMessage

import everstep
from everstep.integrations.strands.calls import storable

if TYPE_CHECKING:
    from strands.multiagent.base import MultiAgentBase

COUNTS = "counts"


@everstep.workflow(name="strands_session")
async def strands_session() -> None:
    """Keep a session: write what is asked for, for as long as there are sessions."""
    counts: dict[str, int] = {}
    async for request in everstep.requests("write", dict, answer=int):
        name, value = request.value["name"], request.value["value"]
        if request.value["append"]:
            everstep.stream(name).append(value)
            counts[name] = counts.get(name, 0) + 1
            everstep.publish(COUNTS, counts)
        else:
            everstep.publish(name, value)
        request.answer(counts.get(name, 0))


class EverstepRepository(SessionRepository):
    """Strands' sessions in an Everstep store. It can be used from any thread."""

    def __init__(self, url: str | None = None, **options: Any) -> None:
        self._opening = everstep.open(url, **options)
        self._app = self._opening.__enter__()

    def close(self) -> None:
        """Give the sessions back. Other processes can go on with them at once."""
        if self._app is not None:
            app, self._app = self._app, None  # type: ignore[assignment]
            app.close()

    # -- sessions ----------------------------------------------------------------------------------------------------
    def create_session(self, session: Session, **kwargs: Any) -> Session:
        """Begin a session."""
        if "session" in self._published(session.session_id):
            raise SessionException(f"There is a session {session.session_id} already.")
        self._write(session.session_id, "session", session.to_dict())
        return session

    def read_session(self, session_id: str, **kwargs: Any) -> Session | None:
        """Return a session, if there is one."""
        found = self._published(session_id).get("session")
        return Session.from_dict(found) if found is not None else None

    # -- agents ------------------------------------------------------------------------------------------------------
    def create_agent(self, session_id: str, session_agent: SessionAgent, **kwargs: Any) -> None:
        """Enter an agent."""
        self._write(session_id, f"agent:{session_agent.agent_id}", session_agent.to_dict())

    def read_agent(self, session_id: str, agent_id: str, **kwargs: Any) -> SessionAgent | None:
        """Return an agent, if it is entered."""
        found = self._published(session_id).get(f"agent:{agent_id}")
        return SessionAgent.from_dict(found) if found is not None else None

    def update_agent(self, session_id: str, session_agent: SessionAgent, **kwargs: Any) -> None:
        """Write an agent anew. When it was entered stays."""
        before = self.read_agent(session_id, session_agent.agent_id)
        if before is None:
            raise SessionException(f"The session {session_id} has no agent {session_agent.agent_id}.")
        session_agent.created_at = before.created_at
        self.create_agent(session_id, session_agent)

    # -- messages ----------------------------------------------------------------------------------------------------
    def create_message(self, session_id: str, agent_id: str, session_message: SessionMessage, **kwargs: Any) -> None:
        """Append a message."""
        self._write(session_id, f"messages:{agent_id}", session_message.to_dict(), append=True)

    def read_message(self, session_id: str, agent_id: str, message_id: int, **kwargs: Any) -> SessionMessage | None:
        """Return a message, if there is one."""
        return self._messages(session_id, agent_id).get(message_id)

    def update_message(self, session_id: str, agent_id: str, session_message: SessionMessage, **kwargs: Any) -> None:
        """Write a message anew: it takes the place of the one with its number."""
        before = self.read_message(session_id, agent_id, session_message.message_id)
        if before is None:
            raise SessionException(f"The session {session_id} has no message {session_message.message_id}.")
        session_message.created_at = before.created_at
        self.create_message(session_id, agent_id, session_message)

    def list_messages(
        self, session_id: str, agent_id: str, limit: int | None = None, offset: int = 0, **kwargs: Any
    ) -> list[SessionMessage]:
        """Return messages in the order of their numbers."""
        found = [one for _, one in sorted(self._messages(session_id, agent_id).items())]
        return found[offset:] if limit is None else found[offset : offset + limit]

    # -- graphs and swarms -------------------------------------------------------------------------------------------
    def create_multi_agent(self, session_id: str, multi_agent: "MultiAgentBase", **kwargs: Any) -> None:
        """Enter a graph or swarm."""
        self._write(session_id, f"multi:{multi_agent.id}", multi_agent.serialize_state())

    def read_multi_agent(self, session_id: str, multi_agent_id: str, **kwargs: Any) -> dict[str, Any] | None:
        """Return the state of a graph or swarm, if it is entered."""
        found: dict[str, Any] | None = self._published(session_id).get(f"multi:{multi_agent_id}")
        return found

    def update_multi_agent(self, session_id: str, multi_agent: "MultiAgentBase", **kwargs: Any) -> None:
        """Write the state of a graph or swarm anew."""
        self.create_multi_agent(session_id, multi_agent)

    # -- the run -----------------------------------------------------------------------------------------------------
    def _run(self, session_id: str) -> Any:
        return self._app.start(strands_session, id=f"session:{session_id}")

    def _write(self, session_id: str, name: str, value: Any, *, append: bool = False) -> None:
        self._run(session_id).ask("write", {"name": name, "value": storable(value), "append": append})

    def _published(self, session_id: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = self._app.get(f"session:{session_id}").published()
        except everstep.errors.UnknownRun:
            return {}
        return found

    def _messages(self, session_id: str, agent_id: str) -> dict[int, SessionMessage]:
        name = f"messages:{agent_id}"
        count = self._published(session_id).get(COUNTS, {}).get(name, 0)
        entries: Iterator[Any] = self._app.get(f"session:{session_id}").stream(name) if count else iter(())
        found: dict[int, SessionMessage] = {}
        for entry in entries:
            message = SessionMessage.from_dict(entry.value)
            found[message.message_id] = message
            if entry.position >= count:
                break
        return found


class EverstepSessionManager(RepositorySessionManager):
    """A session manager for agents, graphs and swarms that run outside of workflows.

        agent = Agent(session_manager=EverstepSessionManager("chat-17"))

    What Strands keeps of a session is durable in the store. It does not make the calls durable: that is `durable(…)`.

    url: as for `everstep.open`. options: as well.
    """

    def __init__(self, session_id: str, *, url: str | None = None, **options: Any) -> None:
        self._repository = EverstepRepository(url, **options)
        super().__init__(session_id=session_id, session_repository=self._repository)

    def close(self) -> None:
        """Give the session back."""
        self._repository.close()
