"""Strands' sessions in an Everstep store: durable when a write returns, seen by whoever comes next."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from strands import Agent, tool
from strands.agent.conversation_manager import NullConversationManager
from strands.multiagent import GraphBuilder, Swarm
from strands.multiagent.base import MultiAgentBase
from strands.types.exceptions import SessionException
from strands.types.session import Session, SessionAgent, SessionMessage, SessionType

import everstep
from everstep.engine.code.recovery_point import load_past
from everstep.integrations.strands import EverstepRepository, EverstepSessionManager, ScriptedModel, durable
from everstep.integrations.strands.calls import storable
from everstep.integrations.strands.sessions import strands_session
from everstep.testing.checker import check, export_histories
from tests.integrations.nursery import Nursery
from tests.waiting import wait_until


def chat(url: str, *answers: str) -> tuple[Agent, EverstepSessionManager]:
    manager = EverstepSessionManager("chat", url=url)
    return Agent(model=ScriptedModel(*answers), session_manager=manager, callback_handler=None), manager


def test_a_conversation_goes_on_in_another_process(url: str) -> None:
    agent, manager = chat(url, "one", "two")
    agent.state.set("word", "tide")
    agent("first")
    manager.close()
    agent, manager = chat(url, "one", "two")
    assert [one["role"] for one in agent.messages] == ["user", "assistant"]
    assert agent.state.get("word") == "tide"
    assert str(agent("second")).strip() == "two"
    manager.close()
    agent, manager = chat(url, "one", "two")
    assert len(agent.messages) == 4
    manager.close()


def test_what_a_repository_writes_it_reads_also_anew(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/everstep.db"
    repository = EverstepRepository(url)
    assert repository.read_session("s") is None
    repository.create_session(Session("s", SessionType.AGENT))
    with pytest.raises(SessionException, match="already"):
        repository.create_session(Session("s", SessionType.AGENT))
    entered = SessionAgent("a", {"n": 1}, {})
    repository.create_agent("s", entered)
    repository.update_agent("s", SessionAgent("a", {"n": 2}, {}))
    found = repository.read_agent("s", "a")
    assert found is not None
    assert (found.state, found.created_at) == ({"n": 2}, entered.created_at)
    for number in range(3):
        said = {"role": "user", "content": [{"text": str(number)}, {"image": {"bytes": b"\x00\xff"}}]}
        repository.create_message("s", "a", SessionMessage.from_message(said, number))  # type: ignore[arg-type]
    other = {"role": "user", "content": [{"text": "redacted"}]}
    repository.update_message("s", "a", SessionMessage.from_message(other, 1))  # type: ignore[arg-type]
    repository.close()
    repository = EverstepRepository(url)
    texts = [one.message["content"][0]["text"] for one in repository.list_messages("s", "a")]
    assert texts == ["0", "redacted", "2"]
    assert [one.message_id for one in repository.list_messages("s", "a", limit=1, offset=1)] == [1]
    image = repository.list_messages("s", "a")[2].message["content"][1]["image"]["bytes"]  # type: ignore[typeddict-item]
    assert image == b"\x00\xff"
    for missing in (
        lambda: repository.update_agent("s", SessionAgent("b", {}, {})),
        lambda: repository.update_message("s", "a", SessionMessage.from_message(other, 9)),  # type: ignore[arg-type]
    ):
        with pytest.raises(SessionException, match="has no"):
            missing()
    repository.close()
    with everstep.open(url) as app:
        assert check(export_histories(app.inner.store)) == []


def members() -> list[Agent]:
    return [Agent(name=name, model=ScriptedModel(f"{name} done"), callback_handler=None) for name in ("one", "two")]


def a_graph(manager: EverstepSessionManager) -> MultiAgentBase:
    builder = GraphBuilder()
    for agent in members():
        builder.add_node(agent, agent.name)
    builder.add_edge("one", "two")
    builder.set_session_manager(manager)
    builder.set_max_node_executions(5)
    return builder.build()


def a_swarm(manager: EverstepSessionManager) -> MultiAgentBase:
    return Swarm(members(), session_manager=manager)


@pytest.mark.parametrize("build", [a_graph, a_swarm])
def test_graphs_and_swarms_keep_their_state_in_it(tmp_path: Path, build: type) -> None:
    url = f"sqlite:///{tmp_path}/everstep.db"
    manager = EverstepSessionManager("team", url=url)
    subject = build(manager)
    assert subject("go").status.value == "completed"
    state = manager.session_repository.read_multi_agent("team", subject.id)
    assert state is not None
    assert state["status"] == "completed"
    manager.close()


def test_in_a_run_the_session_manager_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    agent, manager = chat(f"sqlite:///{tmp_path}/sessions.db", "one")
    assert str(durable(agent, id="d")("hello")).strip() == "one"
    assert manager.session_repository.list_messages("chat", agent.agent_id) == []
    manager.close()


def said(text: str, number: int) -> SessionMessage:
    return SessionMessage.from_message({"role": "user", "content": [{"text": text}]}, number)


def test_a_message_that_is_larger_than_an_entry_of_a_stream_is_kept_whole(url: str) -> None:
    repository = EverstepRepository(url)
    repository.create_session(Session("s", SessionType.AGENT))
    texts = ["small", "é" * 1_500_000, "after it"]
    for number, text in enumerate(texts):
        repository.create_message("s", "a", said(text, number))
    repository.close()
    repository = EverstepRepository(url)
    assert [one.message["content"][0]["text"] for one in repository.list_messages("s", "a")] == texts
    repository.close()


@pytest.mark.parametrize("name", ["my agent", "a#2", "größer/…", "x+20y", "語" * 200])
def test_sessions_and_agents_have_any_names(name: str, tmp_path: Path) -> None:
    repository = EverstepRepository(f"sqlite:///{tmp_path}/everstep.db")
    for session in (name, f"{name}."):
        repository.create_session(Session(session, SessionType.AGENT))
        repository.create_agent(session, SessionAgent(name, {}, {}))
        repository.create_message(session, name, said(session, 0))
    for session in (name, f"{name}."):
        assert repository.read_agent(session, name) is not None
        assert repository.list_messages(session, name)[0].message["content"][0]["text"] == session
    assert repository.read_agent(name, name + name) is None
    repository.close()


def test_a_write_that_is_wrong_is_refused_and_the_session_goes_on(tmp_path: Path) -> None:
    repository = EverstepRepository(f"sqlite:///{tmp_path}/everstep.db")
    repository.create_session(Session("s", SessionType.AGENT))
    run = repository._app.get("session:s")
    for wrong in ({"name": "no name", "value": 1, "append": True}, {"what": "is this"}):
        with pytest.raises((everstep.errors.Misuse, everstep.errors.RequestRefused, TypeError)):
            run.ask("write", wrong)
    repository.create_message("s", "a", said("still here", 0))
    assert len(repository.list_messages("s", "a")) == 1
    repository.close()


def test_to_open_a_session_reads_no_more_events_the_longer_it_is(url: str) -> None:
    read = {}
    for count in (60, 260):
        repository = EverstepRepository(url)
        for number in range(count):
            repository.create_message(f"s-{count}", "a", said("hello", number))
        repository.close()
        repository = EverstepRepository(url)
        store = repository._app.inner.store
        row = store.run(f"session:s-{count}")
        assert row is not None
        assert row.head_seq > 3 * count
        read[count] = len(load_past(store, row).events)
        repository.create_message(f"s-{count}", "a", said("the last", count))
        assert [one.message_id for one in repository.list_messages(f"s-{count}", "a")] == [*range(count + 1)]
        repository.close()
    assert read[260] == read[60] < 60


def test_of_two_processes_that_go_on_with_one_session_one_is_refused_and_nothing_is_lost(
    url: str, tmp_path: Path, strands_nursery: Nursery
) -> None:
    repository = EverstepRepository(url)
    repository.create_session(Session("chat", SessionType.AGENT))
    repository.close()
    office = "tests.integrations.strands_office"
    children = {who: strands_nursery.start(office, url, "", "speak", who, str(tmp_path)) for who in ("ann", "bob")}
    wait_until(lambda: all((tmp_path / f"{who}-is-open").exists() for who in children))
    (tmp_path / "go").touch()
    ended = {who: strands_nursery.wait(child) for who, child in children.items()}
    spoken = [who for who, (status, _) in ended.items() if status == 0]
    refused = [output for status, output in ended.values() if "another process has written to the session" in output]
    assert (len(spoken), len(refused)) == (1, 1), ended
    repository = EverstepRepository(url)
    stored = repository.list_messages("chat", "default")
    assert [one.message["content"][0]["text"] for one in stored] == [f"{spoken[0]} speaks", "heard"]
    found = repository.read_agent("chat", "default")
    assert found is not None
    assert found.state == {"who": spoken[0]}, "nor is its state"
    repository.close()


def test_an_agent_that_another_one_has_gone_on_with_is_refused_until_its_session_is_opened_again(
    tmp_path: Path,
) -> None:
    url = f"sqlite:///{tmp_path}/everstep.db"
    ours, manager = chat(url, "one", "two", "three")
    ours("first")
    theirs, other = chat(url, "one", "two", "three")
    theirs.state.set("word", "tide")
    theirs("second")
    ours.state.set("word", "stale")
    for _ in range(4):
        with pytest.raises(SessionException, match="Open the session again"):
            ours("lost?")
    assert ours.model.calls == 1, "the model was not asked again"  # type: ignore[attr-defined]
    manager.close()
    other.close()
    ours, manager = chat(url, "one", "two", "three")
    assert ours.state.get("word") == "tide"
    assert str(ours("third")).strip() == "three"
    texts = [one["content"][0]["text"] for one in ours.messages]
    assert texts == ["first", "one", "second", "two", "third", "three"]
    manager.close()


@pytest.mark.parametrize("tools", [0, 1])
def test_a_call_that_is_refused_in_its_middle_says_what_of_it_was_written(tools: int, url: str) -> None:
    """While its model answers, or its tool works, another process goes on with the session."""

    def meanwhile() -> None:
        theirs, other = chat(url, "one", "two", "three")
        theirs("theirs")
        other.close()

    @tool
    def look() -> str:
        """Look."""
        if tools:
            meanwhile()
        return "seen"

    class Answering(ScriptedModel):
        async def stream(self, messages: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
            if not tools:
                await asyncio.to_thread(meanwhile)
            async for chunk in super().stream(messages, *args, **kwargs):
                yield chunk

    manager = EverstepSessionManager("chat", url=url)
    answers: list[Any] = [[("look", {})], "done"]
    ours = Agent(model=Answering(*answers), tools=[look], session_manager=manager, callback_handler=None)
    with pytest.raises(SessionException) as refused:
        ours("ours")
    said_of = "messages 0 to 1" if tools else "message 0"
    assert f"Of this call, {said_of} of the agent default had been written before" in str(refused.value)
    assert "repeat" not in str(refused.value)
    with pytest.raises(SessionException, match="Nothing of this call was written") as again:
        ours("once more")
    assert "repeat the call" in str(again.value)
    manager.close()
    repository = EverstepRepository(url)
    stored = [one.to_message() for one in repository.list_messages("chat", "default")]
    texts = [one["content"][-1].get("text") for one in stored if one["role"] == "user"]
    assert [text for text in texts if text] == ["ours", "theirs"]
    repository.close()


def test_a_message_that_is_written_again_is_written_once_and_another_one_is_refused(url: str) -> None:
    repository = EverstepRepository(url)
    repository.create_session(Session("s", SessionType.AGENT))
    repository.create_agent("s", SessionAgent("a", {}, {}))
    for number in range(3):
        repository.create_message("s", "a", said(f"text {number}", number))
    redacted = said("text 1", 1)
    redacted.redact_message = {"role": "user", "content": [{"text": "[redacted]"}]}
    repository.update_message("s", "a", redacted)
    for opened in ("the same", "another"):
        for number in (2, 0, 1):
            repository.create_message("s", "a", said(f"text {number}", number))
            with pytest.raises(SessionException, match=f"another message {number} of the agent a"):
                repository.create_message("s", "a", said("other", number))
        with pytest.raises(SessionException, match="a session s already"):
            repository.create_session(Session("s", SessionType.AGENT))
        with pytest.raises(SessionException, match="an agent a already"):
            repository.create_agent("s", SessionAgent("a", {"n": 1}, {}))
        found = repository.list_messages("s", "a")
        assert [one.message_id for one in found] == [0, 1, 2], opened
        assert [one.to_message()["content"][0]["text"] for one in found] == ["text 0", "[redacted]", "text 2"]
        repository.close()
        repository = EverstepRepository(url)
    repository.close()


def test_a_session_of_the_release_before_is_read_and_its_messages_are_not_replaced(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/everstep.db"
    with everstep.open(url) as app:
        run = app.start(strands_session, id="session:chat")
        manager_state = NullConversationManager().get_state()
        values = {
            "session": Session("chat", SessionType.AGENT),
            "agent:default": SessionAgent("default", {}, manager_state),
        }
        for name, one in values.items():
            run.ask("write", {"name": name, "value": storable(one.to_dict()), "append": False})
        for number in range(2):
            value = storable(said(f"text {number}", number).to_dict())
            run.ask("write", {"name": "messages:default", "value": value, "append": True})
    repository = EverstepRepository(url)
    with pytest.raises(SessionException, match="another message 1"):
        repository.create_message("chat", "default", said("other", 1))
    repository.create_message("chat", "default", said("text 2", 2))
    repository.close()
    manager = EverstepSessionManager("chat", url=url)
    agent = Agent(model=ScriptedModel("one"), session_manager=manager, conversation_manager=NullConversationManager())
    assert [one["content"][0]["text"] for one in agent.messages] == ["text 0", "text 1", "text 2"]
    manager.close()


def test_a_session_is_read_when_all_is_written_that_was_asked_for(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/everstep.db"
    repository = EverstepRepository(url)
    repository.create_session(Session("s", SessionType.AGENT))
    repository.create_message("s", "a", said("text 0", 0))
    repository.close()
    post = {"name": "messages:a", "value": storable(said("text 1", 1).to_dict()), "append": True}
    with everstep.connect(url) as client, pytest.raises(everstep.errors.NoAnswer):
        client.ask("session:s", "write", post, id="messages:a:1", timeout=0.1)  # it is in the inbox, and nowhere else
    repository = EverstepRepository(url)
    assert [one.message_id for one in repository.list_messages("s", "a")] == [0, 1]
    repository.close()
