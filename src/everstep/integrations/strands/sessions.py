"""A session manager for Strands on an Everstep store: SQLite or PostgreSQL.

A session is a run that takes write requests. So each write is durable when it returns, in a history with digests; of
two processes with one session only one drives it, and both see the same. Messages are a stream of the run, which
publishes everything else.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
from strands.hooks import AfterInvocationEvent, HookRegistry
from strands.session.repository_session_manager import RepositorySessionManager
from strands.session.session_repository import SessionRepository
from strands.types.agent import LocalAgent
from strands.types.content import Message
from strands.types.exceptions import SessionException
from strands.types.session import Session, SessionAgent, SessionMessage

import everstep
from everstep.adapters import digest_of, stream_of
from everstep.integrations.strands.calls import storable

if TYPE_CHECKING:
    from strands.multiagent.base import MultiAgentBase

PIECE: Final = "everstep.piece"
PIECE_LENGTH: Final = 200_000
"""Larger messages are appended in pieces of this many characters."""
WORD_LENGTH_MAX: Final = 120
CHECKPOINT_EACH: Final = 50
"""The number of writes between checkpoints, so that opening a session does not take longer as it grows."""


@everstep.workflow(name="strands_session")
async def strands_session() -> None:
    """Keep a session: execute write requests, as long as sessions exist."""
    requests = everstep.requests("write", dict, answer=int)
    written: int = await everstep.checkpoint(0)
    while True:
        request = await anext(requests)
        written += 1
        try:
            _write(**request.value)
        except Exception as error:  # noqa: BLE001  # the request is wrong: the session continues
            request.refuse(error)
        else:
            request.answer(written)
        if written % CHECKPOINT_EACH == 0:
            written = await everstep.checkpoint(written)


def _write(name: str, value: Any, append: bool) -> None:
    if not append:
        everstep.publish(name, value)
        return
    entries = everstep.stream(name)
    text = msgspec.json.encode(value).decode()
    if len(text) <= PIECE_LENGTH:
        entries.append(value)
        return
    for begin in range(0, len(text), PIECE_LENGTH):  # an entry of a stream has its limit, and an image is larger
        entries.append({PIECE: text[begin : begin + PIECE_LENGTH], "more": begin + PIECE_LENGTH < len(text)})


def _whole(entries: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Give the appended messages. What a crash cut off was not acknowledged, and is not included."""
    pieces: list[str] = []
    for entry in entries:
        value = entry.value
        if PIECE not in value:
            yield value
            continue
        pieces.append(value[PIECE])
        if not value["more"]:
            yield msgspec.json.decode("".join(pieces))
            pieces = []


def _run_of(session_id: str) -> str:
    return f"session:{_word(session_id)}"


def _word(text: str) -> str:
    """Return any text as a part of a name or an id. Different texts give different results."""
    word = "".join(
        one
        if one.isascii() and (one.isalnum() or one in "._:@/-")
        else "".join(f"+{byte:02X}" for byte in one.encode())
        for one in text
    )
    return word if len(word) <= WORD_LENGTH_MAX else f"{word[:40]}++{digest_of(text.encode()).hex()[:40]}"


NOTHING_WRITTEN: Final = (
    "Nothing of this call was written. Open the session again, with a new manager and a new agent, and repeat the call."
)


class _IsThere(SessionException):
    """The session or agent exists already."""


class _Taken(SessionException):
    """The number of a message belongs to another message."""

    def in_call(self, agent_id: str, written: Sequence[int]) -> "_Taken":
        """Return the error for a call that had written these messages before."""
        if not written:
            return self
        which = f"message {written[0]}" if len(written) == 1 else f"messages {written[0]} to {written[-1]}"
        return _Taken(
            str(self).replace(
                NOTHING_WRITTEN,
                f"Of this call, {which} of the agent {agent_id} had been written before, and the other process "
                "continues from there; what came later was not written. Open the session again, with a new manager and "
                "a new agent, look at its messages, and ask for what is missing: the same question would be in it "
                "twice.",
            )
        )


class EverstepRepository(SessionRepository):
    """Strands' sessions in an Everstep store. It can be used from any thread."""

    def __init__(self, url: str | None = None, **options: Any) -> None:
        self._up_to_date: set[str] = set()
        """The sessions in which everything is written that was requested before this process came."""
        self._looked_at: set[tuple[str, str]] = set()
        """The sessions and agents whose messages were read before the first one was written here."""
        self._opening = everstep.open(url, **options)
        self._app = self._opening.__enter__()

    def close(self) -> None:
        """Give the sessions back. Other processes can continue them at once."""
        if self._app is not None:
            app, self._app = self._app, None  # type: ignore[assignment]
            app.close()

    # -- sessions ----------------------------------------------------------------------------------------------------
    def create_session(self, session: Session, **kwargs: Any) -> Session:
        """Begin a session."""
        is_there = _IsThere(f"There is a session {session.session_id} already.")
        if "session" in self._published(session.session_id):
            raise is_there
        try:
            self._write(session.session_id, "session", session.to_dict(), id="session")
        except everstep.errors.IdConflict:
            raise is_there from None
        return session

    def read_session(self, session_id: str, **kwargs: Any) -> Session | None:
        """Return a session, if there is one."""
        found = self._published(session_id).get("session")
        return Session.from_dict(found) if found is not None else None

    # -- agents ------------------------------------------------------------------------------------------------------
    def create_agent(self, session_id: str, session_agent: SessionAgent, **kwargs: Any) -> None:
        """Create an agent in a session."""
        is_there = _IsThere(f"The session {session_id} has an agent {session_agent.agent_id} already.")
        name = f"agent:{_word(session_agent.agent_id)}"
        if name in self._published(session_id):
            raise is_there
        try:
            self._write(session_id, name, session_agent.to_dict(), id=name)
        except everstep.errors.IdConflict:
            raise is_there from None

    def read_agent(self, session_id: str, agent_id: str, **kwargs: Any) -> SessionAgent | None:
        """Return an agent, or None."""
        found = self._published(session_id).get(f"agent:{_word(agent_id)}")
        return SessionAgent.from_dict(found) if found is not None else None

    def update_agent(self, session_id: str, session_agent: SessionAgent, **kwargs: Any) -> None:
        """Replace an agent's state. Its time of creation stays."""
        before = self.read_agent(session_id, session_agent.agent_id)
        if before is None:
            raise SessionException(f"The session {session_id} has no agent {session_agent.agent_id}.")
        session_agent.created_at = before.created_at
        self._write(session_id, f"agent:{_word(session_agent.agent_id)}", session_agent.to_dict())

    # -- messages ----------------------------------------------------------------------------------------------------
    def create_message(self, session_id: str, agent_id: str, session_message: SessionMessage, **kwargs: Any) -> None:
        """Append a message. Its number must be free; repeating the same message is the same write."""
        name, number = f"messages:{_word(agent_id)}", session_message.message_id
        if (session_id, agent_id) not in self._looked_at:
            if self._refuse_other(session_id, agent_id, session_message):
                return
            self._looked_at.add((session_id, agent_id))
        try:
            self._write(session_id, name, session_message.to_dict(), append=True, id=f"{name}:{number}")
        except everstep.errors.IdConflict:
            self._up_to_date.discard(session_id)  # the other message may be written only now
            self._refuse_other(session_id, agent_id, session_message)

    def _refuse_other(self, session_id: str, agent_id: str, session_message: SessionMessage) -> bool:
        """Return True if a message exists already. Raises if its number belongs to another message."""
        there = self.read_message(session_id, agent_id, session_message.message_id)
        if there is not None and storable(there.message) != storable(session_message.message):
            raise _Taken(
                f"The session {session_id} has another message {session_message.message_id} of the agent {agent_id}: "
                f"another process has written to the session since this one opened it. {NOTHING_WRITTEN}"
            )
        return there is not None

    def read_message(self, session_id: str, agent_id: str, message_id: int, **kwargs: Any) -> SessionMessage | None:
        """Return a message, if there is one."""
        return self._messages(session_id, agent_id).get(message_id)

    def update_message(self, session_id: str, agent_id: str, session_message: SessionMessage, **kwargs: Any) -> None:
        """Replace the message with its number."""
        before = self.read_message(session_id, agent_id, session_message.message_id)
        if before is None:
            raise SessionException(f"The session {session_id} has no message {session_message.message_id}.")
        session_message.created_at = before.created_at
        self._write(session_id, f"messages:{_word(agent_id)}", session_message.to_dict(), append=True)

    def list_messages(
        self, session_id: str, agent_id: str, limit: int | None = None, offset: int = 0, **kwargs: Any
    ) -> list[SessionMessage]:
        """Return messages in the order of their numbers."""
        found = [one for _, one in sorted(self._messages(session_id, agent_id).items())]
        return found[offset:] if limit is None else found[offset : offset + limit]

    # -- graphs and swarms -------------------------------------------------------------------------------------------
    def create_multi_agent(self, session_id: str, multi_agent: "MultiAgentBase", **kwargs: Any) -> None:
        """Create a graph or swarm."""
        self._write(session_id, f"multi:{_word(multi_agent.id)}", multi_agent.serialize_state())

    def read_multi_agent(self, session_id: str, multi_agent_id: str, **kwargs: Any) -> dict[str, Any] | None:
        """Return the state of a graph or swarm, or None."""
        found: dict[str, Any] | None = self._published(session_id).get(f"multi:{_word(multi_agent_id)}")
        return found

    def update_multi_agent(self, session_id: str, multi_agent: "MultiAgentBase", **kwargs: Any) -> None:
        """Replace the state of a graph or swarm."""
        self.create_multi_agent(session_id, multi_agent)

    # -- the run -----------------------------------------------------------------------------------------------------
    def _run(self, session_id: str) -> Any:
        return self._app.start(strands_session, id=_run_of(session_id))

    def _write(self, session_id: str, name: str, value: Any, *, append: bool = False, id: str | None = None) -> None:
        """Make the run write. An id belongs to one write: the same write is not repeated, and another one is a
        conflict.
        """
        self._run(session_id).ask("write", {"name": name, "value": storable(value), "append": append}, id=id)

    def _bring_up_to_date(self, session_id: str) -> None:
        """Wait for the requests of an earlier process: they were acknowledged, and that process may have ended before.

        Requests are executed in order, so waiting for one more is enough.
        """
        if session_id in self._up_to_date:
            return
        self._up_to_date.add(session_id)
        try:
            self._app.get(_run_of(session_id)).status()
        except everstep.errors.UnknownRun:
            return
        self._write(session_id, "opened", True)

    def _published(self, session_id: str) -> dict[str, Any]:
        self._bring_up_to_date(session_id)
        try:
            found: dict[str, Any] = self._app.get(_run_of(session_id)).published()
        except everstep.errors.UnknownRun:
            return {}
        return found

    def _messages(self, session_id: str, agent_id: str) -> dict[int, SessionMessage]:
        self._bring_up_to_date(session_id)
        found: dict[int, SessionMessage] = {}
        for value in _whole(stream_of(self._app, _run_of(session_id), f"messages:{_word(agent_id)}")):
            message = SessionMessage.from_dict(value)
            found[message.message_id] = message
        return found


class EverstepSessionManager(RepositorySessionManager):
    """A session manager for agents, graphs and swarms that run outside of workflows.

        agent = Agent(session_manager=EverstepSessionManager("chat-17"))

    What Strands keeps of a session is durable in the store. It does not make the calls durable: that is `durable(…)`.

    url: as for `everstep.open`. options: as well.
    """

    def __init__(self, session_id: str, *, url: str | None = None, **options: Any) -> None:
        self._repository = EverstepRepository(url, **options)
        self._behind: dict[str, _Taken] = {}
        """The error for each agent that another process has continued, by its id."""
        self._written: dict[str, list[int]] = {}
        """The numbers of the messages that the current call has written, by the agent's id."""
        try:
            super().__init__(session_id=session_id, session_repository=self._repository)
        except _IsThere:  # another process came first
            super().__init__(session_id=session_id, session_repository=self._repository)

    def initialize(self, agent: LocalAgent, **kwargs: Any) -> None:
        """Create an agent, or load its state from the session."""
        try:
            super().initialize(agent, **kwargs)
        except _IsThere:  # another process came first: use its agent
            del self._latest_agent_message[agent.agent_id]
            self._is_new_session = False
            super().initialize(agent, **kwargs)

    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        """Register the hooks of every session manager, and one for the end of a call."""
        super().register_hooks(registry, **kwargs)
        registry.add_callback(AfterInvocationEvent, self._forget_written)

    def _forget_written(self, event: AfterInvocationEvent) -> None:
        # Strands may append a message before it reports that a call begins, and always reports that one has ended.
        self._written.pop(event.agent.agent_id, None)

    def append_message(self, message: Message, agent: LocalAgent, **kwargs: Any) -> None:
        """Append a message. Every message of an agent that another process has continued is refused."""
        id = agent.agent_id
        before = self._latest_agent_message[id]
        try:
            super().append_message(message, agent, **kwargs)
        except BaseException as error:
            self._latest_agent_message[id] = before  # otherwise the next one would get a free number
            if isinstance(error, _Taken):
                said = self._behind[id] = error.in_call(id, self._written.pop(id, ()))
                raise said from None
            raise
        latest = self._latest_agent_message[id]
        assert latest is not None
        self._written.setdefault(id, []).append(latest.message_id)

    def sync_agent(self, agent: LocalAgent, **kwargs: Any) -> None:
        """Write an agent's state, unless another process has continued the agent."""
        if (error := self._behind.get(agent.agent_id)) is not None:
            raise _Taken(str(error))
        super().sync_agent(agent, **kwargs)

    def close(self) -> None:
        """Give the session back."""
        self._repository.close()
