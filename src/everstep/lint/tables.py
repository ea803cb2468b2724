"""Well-known functions: what each does to the outside, in the words of the guard, and whether it sends or writes."""

import ast
from typing import Final

PATH_METHODS: Final = {
    **dict.fromkeys(("open", "read_text", "read_bytes", "write_text", "write_bytes", "touch"), "open"),
    "unlink": "os.remove",
    **dict.fromkeys(("rename", "replace"), "os.rename"),
    "mkdir": "os.mkdir",
    "rmdir": "os.rmdir",
    **dict.fromkeys(("symlink_to", "hardlink_to"), "os.symlink"),
    **dict.fromkeys(("chmod", "lchmod"), "os.chmod"),
    **dict.fromkeys(("iterdir", "glob", "rglob", "walk"), "os.scandir"),
    **dict.fromkeys(("exists", "is_file", "is_dir", "stat", "lstat", "samefile"), "os.stat"),
}
_OPENS: Final = ("open", "io.open", "os.open", "codecs.open", "gzip.open", "bz2.open", "lzma.open", "zipfile.ZipFile")
_TEMPORARY: Final = ("TemporaryFile", "NamedTemporaryFile", "SpooledTemporaryFile", "TemporaryDirectory", "mkstemp")
_PROCESSES: Final = ("run", "call", "check_call", "check_output", "Popen", "getoutput", "getstatusoutput")
_OS: Final = {
    **dict.fromkeys(("remove", "unlink"), "os.remove"),
    **dict.fromkeys(("rename", "renames", "replace"), "os.rename"),
    **dict.fromkeys(("mkdir", "makedirs"), "os.mkdir"),
    **dict.fromkeys(("rmdir", "removedirs"), "os.rmdir"),
    **dict.fromkeys(("link", "symlink"), "os.symlink"),
    **dict.fromkeys(("truncate", "ftruncate"), "os.truncate"),
    **dict.fromkeys(("chmod", "chown", "lchown", "utime"), "os.chmod"),
    "chdir": "os.chdir",
    **dict.fromkeys(("listdir", "scandir", "walk", "fwalk"), "os.scandir"),
    **dict.fromkeys(("putenv", "environ.update", "environ.setdefault", "environ.pop", "environ.clear"), "os.putenv"),
    "unsetenv": "os.unsetenv",
    **dict.fromkeys(("system", "popen", "startfile"), "os.system"),
    **dict.fromkeys(("fork", "forkpty"), "os.fork"),
    **dict.fromkeys(
        ("posix_spawn", "posix_spawnp", "spawnl", "spawnv", "spawnve", "spawnlp", "spawnvp"), "os.posix_spawn"
    ),
    **dict.fromkeys(("execl", "execle", "execlp", "execv", "execve", "execvp", "execvpe"), "os.exec"),
    **dict.fromkeys(("kill", "killpg"), "os.kill"),
    **dict.fromkeys(("stat", "lstat", "access"), "os.stat"),
    **dict.fromkeys(("path.exists", "path.isfile", "path.isdir", "path.getmtime", "path.getsize"), "os.stat"),
}
OUTSIDE_CALLS: Final[dict[str, str]] = {
    **dict.fromkeys(_OPENS, "open"),
    **{f"os.{name}": event for name, event in _OS.items()},
    **{f"pathlib.Path.{name}": event for name, event in PATH_METHODS.items()},
    **{f"tempfile.{name}": "open" for name in _TEMPORARY},
    "tempfile.mkdtemp": "os.mkdir",
    **dict.fromkeys(
        ("shutil.copy", "shutil.copy2", "shutil.copyfile", "shutil.copytree", "shutil.make_archive"), "open"
    ),
    "shutil.rmtree": "os.remove",
    "shutil.move": "os.rename",
    **dict.fromkeys(("glob.glob", "glob.iglob"), "os.scandir"),
    **{f"subprocess.{name}": "subprocess.Popen" for name in _PROCESSES},
    **dict.fromkeys(("asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell"), "subprocess.Popen"),
    **dict.fromkeys(("multiprocessing.Process", "multiprocessing.Pool"), "subprocess.Popen"),
    "concurrent.futures.ProcessPoolExecutor": "subprocess.Popen",
    "concurrent.futures.ThreadPoolExecutor": "_thread.start_new_thread",
    **dict.fromkeys(("threading.Thread", "threading.Timer", "_thread.start_new_thread"), "_thread.start_new_thread"),
    **dict.fromkeys(("socket.socket", "socket.socketpair", "socket.create_server"), "socket.__new__"),
    **dict.fromkeys(("socket.getaddrinfo", "socket.gethostbyname", "socket.getfqdn"), "socket.getaddrinfo"),
    **dict.fromkeys(("socket.create_connection", "asyncio.open_connection", "asyncio.start_server"), "socket.connect"),
    **dict.fromkeys(("asyncio.open_unix_connection", "asyncio.start_unix_server"), "socket.connect"),
    **dict.fromkeys(("urllib.request.urlopen", "urllib.request.urlretrieve"), "socket.connect"),
    **dict.fromkeys(
        ("psycopg.connect", "psycopg2.connect", "asyncpg.connect", "asyncpg.create_pool"), "socket.connect"
    ),
    **dict.fromkeys(("sqlite3.connect", "aiosqlite.connect", "apsw.Connection"), "sqlite3.connect"),
    **dict.fromkeys(("everstep.testing.ledger.apply", "everstep.testing.ledger.ask"), "socket.connect"),
    "input": "builtins.input",
    "time.sleep": "time.sleep",
}
"""The audit event that each function raises."""

VERBS: Final = frozenset({"get", "post", "put", "patch", "delete", "head", "options", "request", "stream", "send"})
HTTP: Final = ("requests", "httpx", "aiohttp", "urllib3", "niquests")
CONNECTS_AT_ONCE: Final = ("smtplib", "imaplib", "poplib", "ftplib")
CLIENTS: Final = ("openai", "anthropic", "stripe", "boto3", "slack_sdk", "redis", "pymongo", "litellm", "http.client")
QUIET_METHODS: Final = frozenset({"close", "aclose", "__aenter__", "__enter__", "set_debuglevel", "append"})

CLOCKS: Final = frozenset(
    {f"time.{name}" for name in ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns")}
    | {f"time.{name}" for name in ("process_time", "localtime", "gmtime", "ctime", "asctime")}
    | {f"datetime.datetime.{name}" for name in ("now", "utcnow", "today")}
    | {"datetime.date.today", "datetime.datetime.date.today", "arrow.now", "arrow.utcnow", "pendulum.now"}
)
_RANDOM: Final = (
    *("betavariate", "choice", "choices", "expovariate", "gauss", "getrandbits", "normalvariate", "randbytes"),
    *("randint", "random", "randrange", "sample", "seed", "shuffle", "triangular", "uniform"),
)
CHANCE: Final[dict[str, str]] = {
    **{f"random.{name}": "everstep.random()" for name in (*_RANDOM, "SystemRandom")},
    **{f"secrets.{name}": "everstep.random()" for name in ("choice", "randbelow", "randbits")},
    **{f"secrets.{name}": "everstep.uuid()" for name in ("token_bytes", "token_hex", "token_urlsafe")},
    **{f"uuid.{name}": "everstep.uuid()" for name in ("uuid1", "uuid4", "uuid6", "uuid7", "uuid8")},
    "os.urandom": "everstep.random()",
    **{
        f"numpy.random.{name}": "everstep.random()"
        for name in ("rand", "randn", "randint", "random", "choice", "shuffle")
    },
}
"""The deterministic replacement for each function that draws random values."""


OF_THE_PROCESS: Final = frozenset({"os.getpid", "os.getppid", "threading.get_ident", "threading.get_native_id", "id"})
"""Functions whose result belongs to one process."""
_FILE_METHODS: Final = {
    **dict.fromkeys(("write", "writelines", "truncate"), "file.write"),
    **dict.fromkeys(("read", "readline", "readlines"), "file.read"),
}
_SOCKET_METHODS: Final = ("send", "sendall", "sendto", "recv", "recvfrom", "makefile")
_DATABASE_METHODS: Final = ("execute", "executemany", "executescript", "commit")
HANDLE_CALLS: Final[dict[str, str]] = {
    **{f"{made}().{name}": event for made in (*_OPENS, "pathlib.Path.open") for name, event in _FILE_METHODS.items()},
    **{
        f"{made}().{name}": "socket.send"
        for made in ("socket.socket", "socket.create_connection")
        for name in _SOCKET_METHODS
    },
    **{f"sqlite3.connect().{name}": "sqlite3.execute" for name in _DATABASE_METHODS},
}
"""What each method does to something that was opened before. No audit event reports these."""


def outside_event(name: str) -> str | None:
    """Return the audit event that a call of a well-known function leads to."""
    if name in OUTSIDE_CALLS:
        return OUTSIDE_CALLS[name]
    module = next((one for one in (*HTTP, *CONNECTS_AT_ONCE, *CLIENTS) if name.startswith(f"{one}.")), None)
    if module is None:
        return None
    owner, _, last = name.removeprefix(f"{module}.").rpartition(".")
    if module in CONNECTS_AT_ONCE:
        return "socket.connect" if last[:1].isupper() or (owner and last not in QUIET_METHODS) else None
    if not owner:
        return "socket.connect" if module in HTTP and last in VERBS else None
    has_instance = owner.split(".")[0][:1].isupper() or "()" in owner
    if not has_instance or last[:1].isupper() or last in QUIET_METHODS or last.endswith("()"):
        return None
    if module in HTTP:
        return "socket.connect" if last in VERBS else None
    return "socket.connect"


def effect_of(name: str, call: ast.Call) -> str | None:
    """Return `send` or `write` if a call of a well-known function changes the outside."""
    owner, _, last = name.rpartition(".")
    if owner.startswith(HTTP):
        if last == "request":
            first = call.args[0] if call.args else None
            method = first.value if isinstance(first, ast.Constant) else ""
            return "send" if str(method).upper() in ("POST", "PATCH") else None
        return "send" if last in ("post", "patch") else "write" if last in ("put", "delete") else None
    if owner.startswith("smtplib.") and last in ("send_message", "sendmail"):
        return "send"
    if owner.startswith("stripe.") and last in ("create", "create_async", "capture", "confirm"):
        return "send"
    if name in ("slack_sdk.WebClient.chat_postMessage", "everstep.testing.ledger.apply"):
        return "send"
    if name in ("pathlib.Path.write_text", "pathlib.Path.write_bytes"):
        return "write"
    if name in (*_OPENS, "pathlib.Path.open"):
        mode = _mode(call, 0 if name == "pathlib.Path.open" else 1)
        if "a" in mode:
            return "send"  # what is appended again is there twice
        return "write" if set(mode) & set("wx+") else None
    return None


def _mode(call: ast.Call, place: int) -> str:
    given = next((one.value for one in call.keywords if one.arg == "mode"), None)
    if given is None and len(call.args) > place:
        given = call.args[place]
    return str(given.value) if isinstance(given, ast.Constant) else "r"
