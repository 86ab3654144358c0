"""A port for the ranks to meet at, kept for them until they listen on it."""

from __future__ import annotations

import socket
import sys
from types import TracebackType

from forge_core.errors import UsageError


class ReservedPort:
    """Keeps a TCP port from being given to others while the ranks start.

    Rank 0 listens on it only seconds later, when it has imported torch. Until then a socket is bound to it
    here that does not listen: the kernel gives the port to nobody who asks for any, and a listener that sets
    SO_REUSEADDR, as torch's store does, may still take it. Elsewhere than on Linux that listener is refused,
    so that there the port is only looked for and let go.

    Args:
        port: 0 for any free port.

    Raises:
        UsageError: somebody listens on the port already, or this user may not.
    """

    def __init__(self, port: int = 0) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind(("", port))
        except (OSError, OverflowError) as error:
            self._socket.close()
            reason = error.strerror if isinstance(error, OSError) else "a port is a number below 65536"
            raise UsageError(
                f"port {port} cannot be used: {reason}", "leave --master-port out: a free one is found"
            ) from error
        self.number: int = self._socket.getsockname()[1]
        if sys.platform != "linux":
            self._socket.close()

    def __enter__(self) -> ReservedPort:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
