"""Ports for groups of processes on this host."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port() -> Iterator[int]:
    """Yields a port at which rank 0 may listen. Meanwhile the system gives it to nobody that asks for any port."""
    with socket.socket() as held:  # bound, and not listening: one that names the port and reuses addresses may listen
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
