"""Connections between the processes of a simulation: ordered, late, and broken on purpose."""

import collections
import functools
import random
from collections.abc import Callable
from typing import Any

from support.simulation.journal import Journal
from support.simulation.loop import Process, VirtualLoop

MIN_DELAY_S, MAX_DELAY_S = 1e-4, 2e-3
# Now and then a segment is sent again.
LATE_S, LATE_SHARE = 0.2, 0.005
# A connection over which nothing comes for so long is given up, as by gRPC's pings.
PING_TIMEOUT_S = 8.0
REFUSED = "failed to connect to all addresses; last error: Connection refused (111)"
NO_ROUTE = "failed to connect to all addresses; last error: No route to host (113)"
RESET = "Socket closed"

Frame = tuple[Any, ...]


class End:
    """One process's side of a connection."""

    def __init__(self, process: Process, pipe: "_Pipe") -> None:
        self.process = process
        self._pipe = pipe
        # Called as this process.
        self.on_frame: Callable[[Frame], None] = lambda frame: None
        self.on_broken: Callable[[str], None] = lambda reason: None
        self.is_broken = False

    def send(self, frame: Frame) -> None:
        """Lost if the connection is broken, also if nobody knows yet."""
        if not self.is_broken and not self.process.is_dead:
            self._pipe.send(frame)

    def learn_of_break(self, reason: str) -> None:
        if not self.is_broken:
            self.is_broken = True
            self.process.post(self.on_broken, reason)


class _Pipe:
    """One direction of a connection: what is sent arrives in order."""

    def __init__(self, network: "Network", source: Process, target: Process) -> None:
        self._network, self.source, self.target = network, source, target
        self._frames: collections.deque[tuple[float, Frame]] = collections.deque()
        self._last_at = 0.0
        self._is_timed = False
        self.is_closed = False
        self.deliver: Callable[[Frame], None] = lambda frame: None

    def send(self, frame: Frame) -> None:
        at = max(self._last_at, self._network.loop.time() + self._network.delay_s())
        self._last_at = at
        self._frames.append((at, frame))
        self._set_timer(at)

    def close(self) -> None:
        """What is under way is lost."""
        self.is_closed = True
        self._frames.clear()

    def _set_timer(self, at: float) -> None:
        if not self._is_timed:
            self._is_timed = True
            self._network.call_at(at, self._arrive)

    def _arrive(self) -> None:
        self._is_timed = False
        now = self._network.loop.time()
        until = self._network.stalled_until(self.source, self.target)
        if until > now:
            self._set_timer(until)
            return
        while self._frames and self._frames[0][0] <= now:
            self.deliver(self._frames.popleft()[1])
        if self._frames:
            self._set_timer(self._frames[0][0])


class Connection:
    """A TCP connection, from the client's first frame on."""

    def __init__(self, network: "Network", client: Process, server: Process) -> None:
        self._network = network
        self.processes = frozenset((client.name, server.name))
        self._pipes = _Pipe(network, client, server), _Pipe(network, server, client)
        self.client, self.server = End(client, self._pipes[0]), End(server, self._pipes[1])
        for pipe, end in zip(self._pipes, (self.server, self.client), strict=True):
            pipe.deliver = functools.partial(self._deliver, end)

    @property
    def is_open(self) -> bool:
        return not (self.client.is_broken and self.server.is_broken)

    def break_(self, reason: str = RESET, *, late_s: float = 0.0) -> None:
        """Nothing arrives any more; each side learns of it in its time, up to `late_s`."""
        for pipe in self._pipes:
            pipe.close()
        for end in (self.client, self.server):
            wait_s = self._network.random.uniform(0.0, late_s) + self._network.delay_s()
            at = self._network.loop.time() + wait_s
            self._network.call_at(at, functools.partial(end.learn_of_break, reason))

    def _deliver(self, end: End, frame: Frame) -> None:
        if not end.is_broken:
            end.process.post(lambda: None if end.is_broken else end.on_frame(frame))


class Listener:
    """Who takes connections at an address."""

    def __init__(self, process: Process, accept: Callable[[End], None]) -> None:
        self.process, self.accept = process, accept


class Network:
    """All connections, and what is wrong with them."""

    def __init__(self, loop: VirtualLoop, chance: random.Random, journal: Journal) -> None:
        self.loop, self.random, self.journal = loop, chance, journal
        self._listeners: dict[str, Listener] = {}
        self._connections: list[Connection] = []
        self._stalls: dict[tuple[str, str], float] = {}
        self._blocked: set[frozenset[str]] = set()
        self._context = Process(loop, "network")

    def delay_s(self) -> float:
        late_s = LATE_S if self.random.random() < LATE_SHARE else 0.0
        return self.random.uniform(MIN_DELAY_S, MAX_DELAY_S) + late_s

    def call_at(self, at: float, call: Callable[[], None]) -> None:
        """Call at a time, whatever becomes of the process that runs now."""
        self._context.run(self.loop.call_at, at, call)

    # ---- what processes do

    def listen(self, address: str, listener: Listener) -> None:
        self._listeners[address] = listener

    def close_listener(self, address: str, process: Process) -> None:
        listener = self._listeners.get(address)
        if listener is not None and listener.process is process:
            del self._listeners[address]

    def connect(self, client: Process, address: str) -> End:
        """Return the client's end. Frames may be sent at once; if nobody takes them it breaks."""
        listener = self._listeners.get(address)
        is_dead = listener is None or listener.process.is_dead
        server = client if is_dead or listener is None else listener.process
        connection = Connection(self, client, server)
        if is_dead or listener is None:
            connection.break_(REFUSED)
        elif frozenset((client.name, server.name)) in self._blocked:
            connection.break_(NO_ROUTE)
        else:
            self._connections = [each for each in self._connections if each.is_open]
            self._connections.append(connection)
            listener.accept(connection.server)
        return connection.client

    # ---- faults

    def stall(self, source: str, target: str, duration_s: float) -> None:
        """Nothing gets from one process to the other for a while; then all of it comes."""
        self._stalls[source, target] = self.loop.time() + duration_s
        if duration_s > PING_TIMEOUT_S:
            self.call_at(
                self.loop.time() + PING_TIMEOUT_S, lambda: self.reset(source, target, late_s=1.0)
            )

    def stalled_until(self, source: Process, target: Process) -> float:
        return self._stalls.get((source.name, target.name), 0.0)

    def reset(self, one: str, other: str, *, late_s: float = 0.0) -> None:
        """Break all connections between two processes."""
        for connection in self._connections:
            if connection.processes == {one, other} and connection.is_open:
                connection.break_(late_s=late_s)

    def block(self, one: str, other: str) -> None:
        """Let them neither keep a connection nor make a new one."""
        self._blocked.add(frozenset((one, other)))
        self.reset(one, other)

    def unblock(self, one: str, other: str) -> None:
        self._blocked.discard(frozenset((one, other)))

    def drop(self, process: Process) -> None:
        """It is dead: its system closes what it had."""
        for connection in self._connections:
            if process.name in connection.processes and connection.is_open:
                connection.break_()

    def is_reachable(self, one: str, other: str) -> bool:
        return frozenset((one, other)) not in self._blocked
