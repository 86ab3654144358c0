"""Connections that break when a process ends, so that others notice though they wait for nothing from it.

Each rank keeps one to rank 0, which tells the others over the store.
"""

from __future__ import annotations

import os
import secrets
import socket
from contextlib import suppress

from torch.distributed.distributed_c10d import Store

KEY = "lifelines"
ALIVE, FAREWELL = b".", b"x"
TOKEN = 16
"""Bytes by which rank 0 knows its own: other programs may find its port."""
PATIENCE = 5.0
"""Seconds that making a connection may take."""


class Line:
    """A connection to a peer that says that it is there, and before it goes that it goes."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection, self.parted = connection, False

    def say(self, what: bytes) -> None:
        """Send, unless nobody listens any more."""
        with suppress(OSError):
            self.connection.send(what)

    def broken(self) -> bool:
        """Whether the peer has ended without a farewell."""
        try:
            while heard := self.connection.recv(4096):
                self.parted = self.parted or FAREWELL in heard
        except BlockingIOError:
            return False
        except OSError:
            pass
        return not self.parted


class Lifelines:
    """The connections of one rank: rank 0 has one to each other rank, they have one to it.

    Args:
        store: where the ranks met; by it rank 0 says how it is reached, for which the others wait.
        rank: of this process.
        host: of rank 0.

    Attributes:
        parted: `part` was called, and all have been told.
    """

    def __init__(self, store: Store, rank: int, host: str) -> None:
        self.rank, self.host = rank, host
        self.lines: dict[int, Line] = {}
        self._door: socket.socket | None = None
        self._knocking: list[socket.socket] = []
        self._token = b""
        self.parted = False
        if rank == 0:
            self._open(store)
        else:
            self._connect(store)
        os.register_at_fork(after_in_child=self.close)

    def look(self) -> int | None:
        """A rank whose process has ended without a farewell; called once in a while."""
        if self._door is not None:
            self._let_in(self._door)
        for rank, line in list(self.lines.items()):
            if self.rank:  # what stands between machines forgets connections that are silent
                line.say(ALIVE)
            if line.broken():
                return rank
            if line.parted:
                self.lines.pop(rank).connection.close()
        return None

    def part(self) -> None:
        """Say that this process is about to end as it should."""
        for line in list(self.lines.values()):  # the thread that looks lets others in and go meanwhile
            line.say(FAREWELL)
        self.parted = True  # not before all have been told: that thread then closes what is open

    def _open(self, store: Store) -> None:
        where = "0 00"  # the others are not to wait for one that cannot open a port
        with suppress(OSError):
            self._token = secrets.token_bytes(TOKEN)
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            self._door = socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=512)
            self._door.setblocking(False)
            where = f"{self._door.getsockname()[1]} {self._token.hex()}"
        store.set(KEY, where)

    def _connect(self, store: Store) -> None:
        port, token = store.get(KEY).decode().split()
        with suppress(OSError):  # without it a death shows where something is waited for
            connection = socket.create_connection((self.host, int(port)), timeout=PATIENCE)
            connection.sendall(bytes.fromhex(token) + self.rank.to_bytes(4, "big"))
            self.lines[0] = Line(connection)

    def _let_in(self, door: socket.socket) -> None:
        with suppress(OSError):
            while True:
                self._knocking.append(door.accept()[0])
        waiting, self._knocking = self._knocking, []
        for connection in waiting:
            connection.setblocking(False)
            try:
                said = connection.recv(TOKEN + 4, socket.MSG_PEEK)
            except BlockingIOError:
                said = self._token[:1]
            except OSError:
                said = b""
            if len(said) == TOKEN + 4 and said[:TOKEN] == self._token:
                connection.recv(TOKEN + 4)
                self.lines[int.from_bytes(said[TOKEN:], "big")] = Line(connection)
            elif said and self._token.startswith(said[:TOKEN]):
                self._knocking.append(connection)  # the rest is on its way
            else:
                connection.close()

    def close(self) -> None:
        """Let go of all connections; in a process that was forked off, too, or they would last like it."""
        for connection in (self._door, *self._knocking, *(line.connection for line in self.lines.values())):
            if connection is not None:
                connection.close()
        self.lines, self._door, self._knocking = {}, None, []
