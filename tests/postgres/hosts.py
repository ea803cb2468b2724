"""Several hosts on one machine: in network namespaces of their own, or behind a process that swallows everything."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Protocol

import pytest

from tests.postgres import forwarder

FORWARDER = str(Path(forwarder.__file__))


class Network(Protocol):
    """Hosts from which a server can be reached, until one is cut off."""

    def address(self, host: int) -> str:
        """Return the host and port under which a host reaches the server."""
        ...

    def on(self, host: int) -> list[str]:
        """Return what stands before a command that is to run on a host."""
        ...

    def cut(self, host: int) -> None: ...

    def heal(self, host: int) -> None: ...

    def close(self) -> None: ...


class Swallowing:
    """All on the loopback; each host has a forwarder of its own, which can be stopped."""

    def __init__(self, socket: str, hosts: int) -> None:
        self._forwarders = [_begin([], "127.0.0.1", socket) for _ in range(hosts)]
        self._ports = [_port_of(process) for process in self._forwarders]

    def address(self, host: int) -> str:
        return f"127.0.0.1:{self._ports[host]}"

    def on(self, host: int) -> list[str]:
        return []

    def cut(self, host: int) -> None:
        self._forwarders[host].send_signal(signal.SIGSTOP)

    def heal(self, host: int) -> None:
        self._forwarders[host].send_signal(signal.SIGCONT)

    def close(self) -> None:
        for process in self._forwarders:
            process.kill()
            process.communicate()


class Namespaces:
    """A namespace in the middle, from which the server is reached, and one for each host, with a cable between them.

    Nothing of it is connected to the machine's own network.
    """

    def __init__(self, socket: str, hosts: int) -> None:
        if os.geteuid() != 0 or shutil.which("ip") is None:
            pytest.skip("Network namespaces need root and `ip` (iproute2).")
        self._names = [f"ev{os.getpid()}-{number}" for number in range(hosts)]
        self._middle = f"ev{os.getpid()}-m"
        self._forwarders: list[subprocess.Popen[str]] = []
        try:
            for name in (self._middle, *self._names):
                _ip("netns", "add", name)
            for number, name in enumerate(self._names):
                self._connect(number, name)
            self._forwarders = [
                _begin(["ip", "netns", "exec", self._middle], f"10.99.{number}.1", socket) for number in range(hosts)
            ]
            self._ports = [_port_of(process) for process in self._forwarders]
        except (subprocess.CalledProcessError, OSError) as error:
            self.close()
            pytest.skip(f"This machine makes no network namespaces: {error}")

    def _connect(self, number: int, name: str) -> None:
        here, there = f"m{number}", "eth0"
        _ip("-n", self._middle, "link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
        _ip("-n", self._middle, "addr", "add", f"10.99.{number}.1/24", "dev", here)
        _ip("-n", name, "addr", "add", f"10.99.{number}.2/24", "dev", there)
        _ip("-n", self._middle, "link", "set", here, "up")
        _ip("-n", name, "link", "set", there, "up")

    def address(self, host: int) -> str:
        return f"10.99.{host}.1:{self._ports[host]}"

    def on(self, host: int) -> list[str]:
        return ["ip", "netns", "exec", self._names[host]]

    def cut(self, host: int) -> None:
        _ip("-n", self._middle, "link", "set", f"m{host}", "down")

    def heal(self, host: int) -> None:
        _ip("-n", self._middle, "link", "set", f"m{host}", "up")

    def close(self) -> None:
        for process in self._forwarders:
            process.kill()
            process.communicate()
        for name in (self._middle, *self._names):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _begin(before: list[str], address: str, socket: str) -> "subprocess.Popen[str]":
    words = [*before, sys.executable, FORWARDER, address, socket]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def _port_of(process: "subprocess.Popen[str]") -> int:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise OSError("the forwarder did not start")
    return int(line)
