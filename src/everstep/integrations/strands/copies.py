"""A run's own copies of agents, graphs and swarms.

Strands' objects keep a conversation in memory, and all runs of a process share a module's agent. A run that is replayed
must begin with the same state. So each run gets a copy: the configuration is shared, the state is not.
"""

import copy
import inspect
import threading
from typing import Any

import msgspec
from strands.agent import Agent
from strands.agent._agent_as_tool import _AgentAsTool
from strands.agent._concurrency import _ConcurrencyController
from strands.agent.conversation_manager import SummarizingConversationManager
from strands.hooks import HookOrder, HookRegistry
from strands.hooks.events import BeforeNodeCallEvent
from strands.interrupt import _InterruptState
from strands.middleware._registry import MiddlewareRegistry
from strands.middleware.stages import ExecuteToolStage, InvokeModelStage
from strands.multiagent.base import Status
from strands.multiagent.graph import Graph, GraphEdge, GraphNode, GraphState
from strands.multiagent.swarm import SharedContext, Swarm, SwarmNode, SwarmState
from strands.telemetry.metrics import EventLoopMetrics
from strands.tools._caller import _ToolCaller
from strands.tools.registry import ToolRegistry

import everstep
from everstep.errors import Misuse
from everstep.integrations.strands.calls import DurableModel, Price, model_middleware, name_of, tool_middleware
from everstep.integrations.strands.states import SharedState
from everstep.integrations.strands.summaries import Summaries

DEFAULT_NAME = "Strands Agents"


class Options(msgspec.Struct):
    """How the calls of an agent are made durable."""

    contracts: dict[str, dict[str, Any]] = {}
    """Options of `@step` by the names of tools, for tools that are not steps themselves."""
    price: Price | None = None
    """The price of a Strands usage, in dollars, for budgets."""
    stream: str | None = None
    """The stream that tokens are appended to while they arrive."""
    model: dict[str, Any] = {}
    """Options of `@step` for model calls: `retry`, `timeout`, `limit`, `cost`, …"""


def own_copy(subject: Any, options: Options) -> Any:
    """Return a run's own copy of an agent, a graph or a swarm."""
    if isinstance(subject, Agent):
        return _agent(subject, options)
    if isinstance(subject, Graph):
        return _graph(subject, options)
    if isinstance(subject, Swarm):
        return _swarm(subject, options)
    raise Misuse(f"durable() is for agents, graphs and swarms of Strands, not for {type(subject).__name__}.")


def _agent(agent: Agent, options: Options) -> Agent:
    if agent._background_tasks is not None:
        raise Misuse(f"The agent {agent.name!r} has background tasks: they outlive the call, so they are not durable.")
    own = copy.copy(agent)
    name = _model_name(agent)
    own.model = DurableModel(agent.model, name, options.price, options.stream, options.model)
    own.messages = copy.deepcopy(agent.messages)
    own.state = SharedState(agent.state.get())
    own.event_loop_metrics = EventLoopMetrics()
    own.tool_caller = _ToolCaller(own)
    own.trace_span = None
    own._interrupt_state = _InterruptState()
    own._cancel_signal = threading.Event()
    own._model_state = copy.deepcopy(agent._model_state)
    own._concurrency = _ConcurrencyController(agent._concurrency.mode)
    own._session_manager = None  # the run's own history is the session
    own.conversation_manager = copy.copy(agent.conversation_manager)
    own._retry_strategy = copy.copy(agent._retry_strategy)
    swapped = {id(agent.conversation_manager): own.conversation_manager, id(agent._retry_strategy): own._retry_strategy}
    own.hooks = _hooks(agent.hooks, swapped, agent._session_manager)
    own.tool_registry = _tools(agent.tool_registry, options)
    own._middleware_registry = _middleware(agent, options)
    if agent._aux_model is not None:
        own._aux_model = DurableModel(agent._aux_model, f"{name}.aux", options.price, None, options.model)
    if isinstance(own.conversation_manager, SummarizingConversationManager):
        summarizer = own.conversation_manager.summarization_agent
        summarizer = None if summarizer is None else _agent(summarizer, options)
        summaries = Summaries(own.conversation_manager, summarizer, f"{name}.summary", options.model)
        summaries.hook_into(own.hooks)
        own._middleware_registry.add_middleware(InvokeModelStage, summaries.call_model)
    return own


def _model_name(agent: Agent) -> str:
    return "model" if agent.name == DEFAULT_NAME else f"{name_of(agent.name)}.model"


def _hooks(hooks: HookRegistry, swapped: dict[int, Any], dropped: Any = None) -> HookRegistry:
    """Copy a registry. Callbacks of a copied object are bound to the copy, and those of the session are dropped."""
    own = HookRegistry()
    for kind, entries in hooks._registered_callbacks.items():
        kept = own._registered_callbacks.setdefault(kind, [])
        for entry in entries:
            owner = getattr(entry.callback, "__self__", None)
            if _is_of(entry.callback, dropped):
                continue
            entry = copy.copy(entry)  # noqa: PLW2901
            if id(owner) in swapped:
                entry.callback = getattr(entry.callback, "__func__").__get__(swapped[id(owner)])  # noqa: B009
            kept.append(entry)
    return own


def _is_of(callback: Any, owner: Any) -> bool:
    """Return True if a callback belongs to an object: it is its method, or has it in its closure."""
    if owner is None:
        return False
    closed_over = inspect.getclosurevars(callback).nonlocals.values() if inspect.isfunction(callback) else ()
    return getattr(callback, "__self__", None) is owner or any(one is owner for one in closed_over)


def _tools(registry: ToolRegistry, options: Options) -> ToolRegistry:
    own = copy.copy(registry)
    own.dynamic_tools = dict(registry.dynamic_tools)
    own.registry = dict(registry.registry)
    for name, tool in registry.registry.items():
        if isinstance(tool, _AgentAsTool):
            inner = copy.copy(tool)
            inner._agent = _agent(tool._agent, options)
            inner._lock = threading.Lock()
            own.registry[name] = inner
    return own


def _middleware(agent: Agent, options: Options) -> MiddlewareRegistry:
    """Copy a registry, and add ours last: it is the innermost."""
    own = MiddlewareRegistry()
    own._handlers = {stage: list(handlers) for stage, handlers in agent._middleware_registry._handlers.items()}
    own.add_middleware(
        InvokeModelStage, model_middleware(_model_name(agent), options.price, options.stream, options.model)
    )
    own.add_middleware(ExecuteToolStage, tool_middleware(options.contracts))
    return own


# -- graphs ----------------------------------------------------------------------------------------------------------
class _Node(GraphNode):
    """A node that hashes by its place in the graph, so that sets of nodes have one order in every process."""

    place = 0

    def __hash__(self) -> int:
        return self.place


def _graph(graph: Graph, options: Options) -> Graph:
    own = copy.copy(graph)
    own.nodes = {}
    for place, (id, node) in enumerate(graph.nodes.items()):
        made = _Node(id, own_copy(node.executor, options))
        made.place = place
        own.nodes[id] = made
    for id, node in graph.nodes.items():
        own.nodes[id].dependencies = {own.nodes[one.node_id] for one in node.dependencies}
    places = {id: place for place, id in enumerate(graph.nodes)}
    edges = sorted(graph.edges, key=lambda one: (places[one.from_node.node_id], places[one.to_node.node_id]))
    own.edges = [  # type: ignore[assignment]  # a list has an order, and a set of edges has another in each process
        GraphEdge(own.nodes[one.from_node.node_id], own.nodes[one.to_node.node_id], one.condition) for one in edges
    ]
    first = sorted(graph.entry_points, key=lambda one: places[one.node_id])
    own.entry_points = [own.nodes[one.node_id] for one in first]  # type: ignore[assignment]
    own.state = GraphState()
    own._interrupt_state = _InterruptState()
    own._resume_next_nodes, own._resume_from_session = [], False
    own.hooks = _hooks(graph.hooks, {}, graph.session_manager)
    own.session_manager = None
    own.hooks.add_callback(BeforeNodeCallEvent, _begin_node, order=HookOrder.SDK_LAST)
    return own


def _swarm(swarm: Swarm, options: Options) -> Swarm:
    own = copy.copy(swarm)
    own.nodes = {}
    for id, node in swarm.nodes.items():
        executor = _agent(node.executor, options)
        executor.tool_registry.registry.pop("handoff_to_agent", None)  # it would hand over in the original swarm
        own.nodes[id] = SwarmNode(id, executor, swarm=own)
    entry = swarm.entry_point
    own.entry_point = None if entry is None else own.nodes[str(entry.name)].executor
    own.shared_context = SharedContext(copy.deepcopy(swarm.shared_context.context))
    own.state = SwarmState(current_node=None, task="", completion_status=Status.PENDING)
    own._interrupt_state = _InterruptState()
    own._resume_from_session, own._turn = False, None
    own.hooks = _hooks(swarm.hooks, {}, swarm.session_manager)
    own.session_manager = None
    own.hooks.add_callback(BeforeNodeCallEvent, _begin_node, order=HookOrder.SDK_LAST)
    own._inject_swarm_tools()
    return own


async def _begin_node(event: BeforeNodeCallEvent) -> None:
    """Record that a node begins. It is durable before anything else of the node."""
    await everstep.step(_nothing, name=f"node.{name_of(event.node_id)}")()


async def _nothing() -> None:
    """Do nothing: only the event is needed."""
