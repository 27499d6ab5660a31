"""A worker's transport alone: transport_process.py ENGINE_ID [TRANSPORT [DEVICE [NUM_BLOCKS]]].

UCX reads its settings once in a process, and the devices of a network namespace are few and stay.
Prints its welcome in hex, then does what lines on stdin say and answers each with a line of JSON.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from pdserve.v1 import kv_transfer_service_pb2 as kv_pb2
from pdserve_common.types.kv import KVLinkWelcome
from pdserve_common.wire import (
    kv_link_response_from_proto,
    kv_link_response_to_proto,
)
from pdserve_engine.kv_transfer.transport import nixl_transport
from support.handoff import (
    Landed,
    fill,
    make_identity,
    make_pool,
    make_transport,
    num_fds,
    welcome_of,
)
from support.local_transport import LocalRegistry
from support.waiting import wait_until

CONNECT_S = 0.5


class Transport:
    """Its methods are the lines that it obeys."""

    def __init__(
        self,
        engine_id: str,
        require_transport: str = "tcp",
        device: str = "cpu",
        num_blocks: str = "64",
    ) -> None:
        identity = make_identity(engine_id)
        self.pool = make_pool(sum(engine_id.encode()), int(num_blocks), device=device)
        options = {"require_transport": require_transport, "device": device}
        self.transport = make_transport("nixl", identity, LocalRegistry(), self.pool, **options)
        self.transport.expect_peer()
        message = kv_link_response_to_proto(welcome_of(identity, self.transport))
        self.welcome = message.SerializeToString().hex()
        self.lost: list[str] = []

    def add(self, welcome: str) -> str:
        message = kv_pb2.KvLinkResponse.FromString(bytes.fromhex(welcome))
        parsed = kv_link_response_from_proto(message)
        assert isinstance(parsed, KVLinkWelcome)
        self.lost.clear()
        return self.transport.add_peer(parsed, self.lost.append)

    def add_near(self) -> str:
        """Read from another worker of this process; others get less time from then on."""
        self.near = Transport("near")
        peer = self.add(self.near.welcome)
        assert self.read(peer) == ""
        nixl_transport.CONNECT_S = CONNECT_S
        return peer

    def read(self, peer: str) -> str:
        """Return what went wrong."""
        landed = Landed()
        self.transport.read(peer, [1], [2], 60.0, landed.on_done, landed.on_stall)
        return str(wait_until(lambda: landed.results)[0].error)

    def read_all(self, peer: str) -> tuple[str, str]:
        """Read the peer's whole pool, the other way round; return how, and what went wrong."""
        block_ids, landed = list(range(self.pool.num_blocks)), Landed()
        self.transport.read(peer, block_ids, block_ids[::-1], 60.0, landed.on_done, landed.on_stall)
        result = wait_until(lambda: landed.results)[0]
        return result.transport, result.error

    def checksums(self) -> tuple[int, ...]:
        return self.pool.block_checksums(range(self.pool.num_blocks))

    def export(self) -> None:
        """Prove that bytes move, leave other ones in the pool, and let peers read them."""
        self.transport.self_check()
        fill(self.pool, 3)
        self.transport.set_exporting(True)

    def lose(self, peer: str) -> str:
        """Remove a peer when it is lost, and return why it was."""
        reason = wait_until(lambda: self.lost)[0]
        self.transport.remove_peer(peer)
        return str(reason)

    def state(self) -> tuple[int, str | None]:
        return num_fds(), self.transport.failure

    def close(self) -> str | None:
        self.transport.close()
        return self.transport.failure


def main(*arguments: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what UCX and NIXL say
    worker = Transport(*arguments)
    print(worker.welcome, file=answers, flush=True)
    for line in sys.stdin:
        name, *arguments = line.split()
        answer: Any = getattr(worker, name)(*arguments)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
