"""Each rule finds its mistakes, and leaves alone what only looks like one."""

import textwrap

import pytest

from everstep.lint.linting import lint_text
from everstep.model.mistakes import RULES

HEAD = """\
import asyncio, os, sys, random, secrets, subprocess, socket, sqlite3, smtplib, tempfile, threading, time, uuid
import datetime as dt
import httpx, requests
from datetime import date, datetime
from pathlib import Path
import everstep
from everstep import step, workflow

SEEN: list[str] = []
CACHE = {}
HERE = Path(__file__)
client = httpx.AsyncClient()
DIARY = open("diary.txt", "a")
LINK = socket.create_connection(("a", 1))
BOOKS = sqlite3.connect("books.db")

class Session:
    seen = []

    def __init__(self): self.tokens, self.kept = {}, {}

    def log_in(self, user): self.tokens[user] = "token"

    def token(self, user): return self.tokens[user]

    def cached(self, user):
        if user not in self.kept:
            self.kept[user] = 1
        return self.kept[user]

SESSION = Session()

@step(effect="read")
async def look(x=None): ...

@step(effect="read")
def look_plainly(x=None): ...

@step(effect="once")
async def pay(x): ...

"""


def rules_in(text: str) -> list[str]:
    return [one.rule for one in lint_text("app.py", HEAD + textwrap.dedent(text))]


def in_workflow(body: str, *, word: str = "async def") -> str:
    return f"@workflow\n{word} flow(topic: str):\n" + textwrap.indent(textwrap.dedent(body), "    ")


BAD_BODIES = [
    *("outside", "open('x')"),
    *("outside", "with Path('a').open() as file: pass"),
    *("outside", "(Path('a') / 'b').write_text('x')"),
    *("outside", "HERE.parent.joinpath('x').read_bytes()"),
    *("outside", "path = Path('x')\nif path.exists(): pass"),
    *("outside", "os.remove('x')"),
    *("outside", "os.environ['A'] = 'b'"),
    *("outside", "tempfile.NamedTemporaryFile()"),
    *("outside", "subprocess.run(['true'])"),
    *("outside", "await asyncio.create_subprocess_exec('true')"),
    *("outside", "socket.create_connection(('a', 1))"),
    *("outside", "threading.Thread(target=print).start()"),
    *("outside", "sqlite3.connect('x.db')"),
    *("outside", "requests.get('x')"),
    *("outside", "session = requests.Session()\nsession.post('x')"),
    *("outside", "await client.post('x')"),
    *("outside", "async with httpx.AsyncClient() as own:\n    await own.get('x')"),
    *("outside", "smtplib.SMTP('host')"),
    *("outside", "input('?')"),
    *("outside", "import shutil as s\ns.rmtree('x')"),
    *("outside", "from urllib.request import urlopen as fetch\nfetch('x')"),
    *("outside", "send = requests.post\nsend('x')"),
    *("outside", "DIARY.write(topic)"),
    *("outside", "print(topic, file=DIARY)"),
    *("outside", "LINK.sendall(b'x')"),
    *("outside", "BOOKS.execute('delete from books')"),
    *("sleep", "time.sleep(1)"),
    *("clock", "time.time()"),
    *("clock", "datetime.now()"),
    *("clock", "dt.datetime.utcnow()"),
    *("clock", "date.today()"),
    *("clock", "begun = time.perf_counter()"),
    *("clock", "await look(time.strftime('%H'))"),
    *("clock", "await look(x=f'{time.time():.0f}')"),
    *("chance", "os.getpid()"),
    *("chance", "id(topic)"),
    *("chance", "random.random()"),
    *("chance", "random.Random().choice([1])"),
    *("chance", "uuid.uuid4()"),
    *("chance", "os.urandom(3)"),
    *("chance", "secrets.token_hex()"),
    *("order", "for x in {'a', 'b'}:\n    await look(x)"),
    *("order", "names = set(topic)\nfor x in names:\n    await look(x)"),
    *("order", "await asyncio.gather(*(look(x) for x in set(topic)))"),
    *("order", "await asyncio.gather(*map(look, set(topic)))"),
    *("order", "await look(list(set(topic)))"),
    *("order", "await look(', '.join({'a', topic}))"),
    *("order", "await look(x=list(set(topic)))"),
    *("order", "names = list(set(topic))\nawait look(names)"),
    *("order", "names = [*set(topic)]\nawait look(names[0])"),
    *("order", "await look(next(iter(set(topic))))"),
    *("order", "todo = set(topic)\nwhile todo:\n    await look(todo.pop())"),
    *("order", "for x in set(topic) - {'a'}:\n    await asyncio.to_thread(look_plainly, x)"),
    *("globals", "SEEN.append(topic)"),
    *("globals", "CACHE[topic] = 1"),
    *("globals", "CACHE[topic]['x'].append(1)"),
    *("globals", "SESSION.user = topic"),
    *("globals", "SESSION.tokens[topic] = 1"),
    *("globals", "SESSION.log_in(topic)"),
    *("globals", "Session.seen.append(topic)"),
    *("globals", "global HERE\nHERE = None"),
    *("loop", "asyncio.run(look())"),
    *("thread", "await asyncio.to_thread(requests.get, 'x')"),
    *("thread", "await asyncio.to_thread(lambda: 1)"),
    *("thread", "await asyncio.get_running_loop().run_in_executor(None, os.listdir, '.')"),
    *("blocks", "look_plainly(1)"),
    *("unawaited", "look(1)"),
    *("unawaited", "unused = look(1)"),
    *("unawaited", "asyncio.sleep(3)"),
    *("unawaited", "everstep.receive('go', bool)"),
    *("swallowed", "try:\n    await look(1)\nexcept:\n    pass"),
    *("swallowed", "try:\n    await look(1)\nexcept BaseException as error:\n    print(error)"),
    *("swallowed", "try:\n    await look(1)\nexcept (ValueError, everstep.Evicted):\n    pass"),
    *("encode", "await look(lambda: 1)"),
    *("encode", "await look(x=(n for n in topic))"),
    *("encode", "await asyncio.to_thread(look_plainly, threading.Lock())"),
]


@pytest.mark.parametrize(("rule", "body"), list(zip(BAD_BODIES[::2], BAD_BODIES[1::2], strict=True)))
def test_a_mistake_in_a_workflow_is_found(rule: str, body: str) -> None:
    assert rules_in(in_workflow(body)) == [rule]


@pytest.mark.parametrize(
    "body",
    [
        "time = everstep.now()\ntime.time()",
        "random = everstep.random()\nrandom.choice([1])",
        "random.Random(7).choice([1])",
        "everstep.uuid(), everstep.random().random()",
        "open = print\nopen('x')",
        "await asyncio.sleep(1)",
        "print(topic)",
        "for x in sorted({'a', 'b'}):\n    await look(x)",
        "for x in {1, 2}:\n    await look(x)",
        "for x in {'a', 'b'}:\n    print(x)",
        "await look(sorted(set(topic)))",
        "await look(set(topic))",
        "if topic in {'a', 'b'}: await look(1)",
        "SEEN = []\nSEEN.append(topic)",
        "CACHE.get(topic)",
        "SESSION.token(topic), SESSION.cached(topic)",
        "SESSION = Session()\nSESSION.user = topic\nSESSION.log_in(topic)",
        "names = sorted(set(topic))\nawait look(names[0])",
        "names = list(set(topic))\nprint(names)",
        "print(topic, file=sys.stderr)",
        "time.strftime('%H', (2030, 1, 1, 0, 0, 0, 0, 1, 0))",
        "def write(x): ...\nwrite(topic)",
        "await asyncio.to_thread(look_plainly, 1)",
        "task = asyncio.create_task(look(1))\nawait task",
        "asyncio.create_task(look(1))",
        "both = [look(1), look(2)]\nawait asyncio.gather(*both)",
        "later = look(1)\nawait later",
        "try:\n    await look(1)\nexcept BaseException:\n    print(1)\n    raise",
        "try:\n    await look(1)\nexcept Exception:\n    pass",
        "try:\n    int(topic)\nexcept:\n    pass",
        "try:\n    await look(1)\nexcept asyncio.CancelledError:\n    return 'cancelled'",
        "await step(requests.get, name='get', effect='read')('x')",
        "await everstep.expect(everstep.witness.value('x', lambda: open('x').read()))",
        "await everstep.files.write('x', 'y')",
        "later = datetime(2030, 1, 1)",
        "Path('a') / 'b'",
        "own = httpx.AsyncClient()",
        "path = os.path.join('a', 'b')",
    ],
)
def test_what_only_looks_like_a_mistake_is_left_alone(body: str) -> None:
    assert rules_in(in_workflow(body)) == []


@pytest.mark.parametrize(
    ("rule", "body"),
    [
        ("await", "look(1)"),
        ("loop", "asyncio.run(client.get('x'))"),
        ("swallowed", "try:\n    look_plainly(1)\nexcept:\n    pass"),
        ("swallowed", "try:\n    everstep.blocking.sleep(1)\nexcept BaseException:\n    pass"),
        ("outside", "everstep.blocking.gather(lambda: open('x'))"),
    ],
)
def test_a_mistake_in_a_def_workflow_is_found(rule: str, body: str) -> None:
    assert rule in rules_in(in_workflow(body, word="def"))


def test_a_def_workflow_calls_def_steps_directly() -> None:
    assert rules_in(in_workflow("look_plainly(1)", word="def")) == []


HELPERS = """
def third():
    return requests.get("x")

def second():
    return third()

class Agent:
    def ask(self):
        return open("x")

    @workflow
    async def run(self):
        self.ask()
        second()

def unrelated():
    return open("x")

@step
def in_a_step():
    return third()
"""


def test_helpers_are_followed_through_functions_and_methods() -> None:
    found = lint_text("app.py", HEAD + HELPERS)
    assert [(one.function, one.via) for one in found] == [
        ("third", ("Agent.run", "second", "third")),
        ("Agent.ask", ("Agent.run", "Agent.ask")),
    ]


def test_nested_functions_are_followed_when_they_are_called() -> None:
    body = "async def visit():\n    open('x')\nawait asyncio.gather(visit(), visit())"
    assert rules_in(in_workflow(body)) == ["outside"]
    body = "def observe():\n    return open('x').read()\nawait everstep.expect(everstep.witness.value('x', observe))"
    assert rules_in(in_workflow(body)) == []


def test_helpers_that_call_each_other_do_not_make_it_go_round_in_circles() -> None:
    text = "def a():\n    b()\n\ndef b():\n    a()\n    open('x')\n\n" + in_workflow("a()")
    assert rules_in(text) == ["outside"]


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("key", "@step\nasync def send():\n    requests.post('x')"),
        (
            "key",
            "@everstep.step(effect='repeat', timeout=3)\ndef send():\n    with smtplib.SMTP('x') as s:\n        s.send_message('x')",  # noqa: E501
        ),
        ("key", "@step\ndef note(x):\n    with open('x', 'a') as file:\n        file.write(x)"),
        ("key", "def inner():\n    requests.request('POST', 'x')\n\n@step\ndef send():\n    inner()"),
        (
            "effects",
            "@step\ndef send():\n    requests.post('x', headers={'k': everstep.key()})\n    requests.post('y')",
        ),
        ("effects", "@step(effect='once')\ndef send():\n    requests.post('x')\n    Path('x').write_text('sent')"),
        ("effects", "@step(effect='once')\ndef send(all):\n    for one in all:\n        requests.post(one)"),
        ("effects", "def tell():\n    requests.post('x')\n\n@step(effect='once')\ndef send():\n    tell()\n    tell()"),
        ("nested", "@step\nasync def outer():\n    await pay(1)"),
        ("nested", "@step(key='k')\ndef keyed(): ...\n\n@step\ndef outer():\n    keyed()"),
        ("encode", "@step\nasync def outer(f=lambda: 1): ..."),
        ("encode", "@workflow\nasync def flow(*, lock=threading.Lock()): ..."),
        (
            "globals",
            "@step\nasync def note(x):\n    SEEN.append(x)\n\n@workflow\nasync def flow():\n    await note(1)\n    return len(SEEN)",  # noqa: E501
        ),
        ("globals", "@step\ndef log_in(x):\n    SESSION.log_in(x)\n\n@step\ndef ask(x):\n    SESSION.token(x)"),
        ("globals", "@step\ndef log_in(x):\n    SESSION.log_in(x)\n\n@step\ndef ask(x):\n    SESSION.tokens[x]"),
        ("globals", "@step\ndef log_in(x):\n    SESSION.user = x\n\n@step\ndef ask():\n    return SESSION.user"),
        ("import", "everstep.run(look)"),
        ("import", "with open('x') as file:\n    print(everstep.run(look))"),
        ("import", "try:\n    pass\nfinally:\n    everstep.run(look)"),
    ],
)
def test_a_mistake_elsewhere_is_found(rule: str, text: str) -> None:
    assert rules_in(text) == [rule]


@pytest.mark.parametrize(
    "text",
    [
        "@step\ndef send():\n    requests.post('x', headers={'k': everstep.key()})",
        "def inner():\n    return everstep.key()\n\n@step\ndef send():\n    requests.post('x', headers={'k': inner()})",
        "@step(key='invoice:{x}')\ndef send(x):\n    requests.post('x')",
        "@step(effect='read')\ndef ask():\n    requests.post('x')\n    requests.post('y')",
        "@step(effect='once')\ndef send():\n    requests.post('x')",
        "@step\ndef write():\n    Path('a').write_text('x')\n    Path('b').write_text('x')",
        "@step(effect='once')\ndef send(x):\n    if x:\n        requests.post('x')\n    else:\n        requests.post('y')",  # noqa: E501
        "@step(effect='once')\ndef send(x):\n    if x:\n        return requests.post('x')\n    return requests.post('y')",  # noqa: E501
        "@step(effect='once')\ndef send(x):\n    try:\n        requests.post('x')\n    except OSError:\n        requests.post('y')",  # noqa: E501
        "@step(effect='once')\ndef send(all):\n    for one in all:\n        requests.post(one)\n        break",
        "@step(effect=CHOSEN)\ndef send():\n    requests.post('x')",
        "@step\nasync def outer():\n    await look(1)",
        "@step\nasync def outer(f: everstep.Live[object] = lambda: 1): ...",
        "@step\nasync def note(x):\n    SEEN.append(x)\n\ndef main():\n    print(SEEN)",
        "@step\nasync def cached(x):\n    if x not in CACHE:\n        CACHE[x] = 1\n    return CACHE[x]",
        "@step\ndef log_in(x):\n    SESSION.log_in(x)\n\n@step\ndef ask(x):\n    SESSION.cached(x)",
        "@step\ndef log_in(x):\n    SESSION.log_in(x)\n    return SESSION.tokens[x]",
        "@step\ndef note(x):\n    DIARY.write(x)",
        "if __name__ == '__main__':\n    everstep.run(look)",
        "def main():\n    everstep.run(look)",
        "def plain():\n    open('x')\n    time.sleep(1)\n    random.random()",
    ],
)
def test_what_is_right_elsewhere_is_left_alone(text: str) -> None:
    assert rules_in(text) == []


def test_every_rule_has_a_case_here() -> None:
    tested = {*BAD_BODIES[::2]} | {"await", "key", "effects", "nested", "import", "reason", "syntax"}
    assert tested == set(RULES)


def test_a_line_with_a_reason_is_silenced() -> None:
    assert rules_in(in_workflow("time.time()  # everstep: ok, only for the log")) == []
    assert rules_in(in_workflow("look(\n    1,\n)  # everstep: ok (it is started elsewhere)")) == []
    assert rules_in(in_workflow("time.time()\nprint(1)  # everstep: ok, another line")) == ["clock"]


def test_silence_needs_a_reason() -> None:
    assert rules_in(in_workflow("time.time()  # everstep: ok")) == ["reason", "clock"]
    assert rules_in(in_workflow("x = '# everstep: ok'")) == []


def test_a_handler_is_not_silenced_by_a_line_of_its_body() -> None:
    body = "try:\n    await look(1)\nexcept:\n    print(1)  # everstep: ok, because"
    assert rules_in(in_workflow(body)) == ["swallowed"]


def test_a_file_that_is_no_python_is_a_finding_and_one_without_everstep_is_none() -> None:
    assert [one.rule for one in lint_text("x.py", "import everstep\ndef (:\n")] == ["syntax"]
    assert lint_text("x.py", "# about everstep\nimport time\ntime.time()\n") == []


def test_steps_that_share_a_helper_are_judged_one_by_one() -> None:
    text = (
        "def tell(key=''):\n    requests.post('x', headers={'k': key})\n\n"
        "@step\ndef one():\n    tell()\n\n@step\ndef two():\n    tell()\n\n"
        "@step\ndef right():\n    tell(everstep.key())\n"
    )
    found = lint_text("app.py", HEAD + text)
    assert [(one.rule, one.function) for one in found] == [("key", "one"), ("key", "two")]
    assert [one.source for one in found] == ["def one():", "def two():"]


def test_a_file_that_the_body_opens_itself_is_found_once() -> None:
    assert rules_in(in_workflow("with open('x', 'a') as own:\n    own.write(topic)\n    print(1, file=own)")) == [
        "outside"
    ]


def test_functions_that_are_nodes_of_graphs_are_workflow_code_unless_they_have_a_contract() -> None:
    text = """
    graph = everstep.Graph("g")

    async def named(state): open("x")

    @graph.node
    async def decorated(state): time.sleep(1)

    @graph.node(join="any")
    async def with_options(state): return random.random()

    @graph.node(effect="read")
    async def reads(state): return open("x").read()

    async def reads_too(state): return open("x").read()

    async def no_node(state): return open("x").read()

    graph.node(named)
    graph.node(reads_too, effect="read")

    def build():
        inner = everstep.Graph("inner")

        @inner.node
        def inside(state): open("x")
    """
    assert sorted(rules_in(text)) == ["chance", "outside", "outside", "sleep"]
