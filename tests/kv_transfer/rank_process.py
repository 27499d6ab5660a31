"""Ranks of a worker in a process: rank_process.py p CUTS TRANSPORT EPOCH RANK is one of P's, and
rank_process.py d CUTS TRANSPORT all of D's. CUTS is a name in support/shards.py.

Prints its welcome in hex, then does what lines on stdin say and answers each with a line of JSON.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from pdserve.v1 import kv_transfer_service_pb2 as kv_pb2
from pdserve_common.types.kv import PROTOCOL_VERSION, KVEndpoint, KVLinkWelcome
from pdserve_common.wire import kv_link_response_from_proto, kv_link_response_to_proto
from pdserve_engine.kv_transfer.transport import factory
from support.handoff import NUM_BLOCKS, Landed, make_identity
from support.local_transport import LocalRegistry
from support.shards import CUTS, CutPool, make_cut_side
from support.waiting import wait_until


class PRank:
    """Its methods are the lines that it obeys."""

    def __init__(self, cuts: str, required: str, epoch: str, rank: str) -> None:
        self.ranks = CutPool(CUTS[cuts], "p")
        pools, layout = self.ranks.pools, self.ranks.spec.layout()
        identity = make_identity("p0", epoch=epoch, layout=layout, num_ranks=len(pools))
        self.transport = factory.make_transport(
            identity, rank=int(rank), require_transport=required
        )
        self.transport.register(pools[int(rank)])
        self.transport.self_check()
        self.ranks.fill(1)
        self.transport.expect_peer()
        self.transport.set_exporting(True)
        endpoint = replace(self.transport.endpoint(), rank=int(rank))
        welcome = KVLinkWelcome(
            protocol_version=PROTOCOL_VERSION,
            engine_id=identity.engine_id,
            epoch=identity.epoch,
            compatibility_hash=identity.compatibility_hash,
            link=1,
            endpoint=KVEndpoint(ranks=(endpoint,), transport=required),
        )
        self.welcome = kv_link_response_to_proto(welcome).SerializeToString().hex()

    def checksums(self) -> tuple[int, ...]:
        """Of the whole model's blocks: this process has filled all of its pools."""
        return self.ranks.block_checksums(range(NUM_BLOCKS))

    def close(self) -> str | None:
        self.transport.close()
        return self.transport.failure


class D:
    """Its methods are the lines that it obeys."""

    welcome = ""

    def __init__(self, cuts: str, required: str) -> None:
        self.ranks = CutPool(CUTS[cuts], "d")
        _, self.transport = make_cut_side(
            "nixl", self.ranks, LocalRegistry(), require_transport=required
        )
        self.transport.self_check()
        self.landed = Landed()
        self.lost: list[str] = []

    def add(self, *welcomes: str) -> str:
        """Of each of P's ranks."""
        parsed = []
        for welcome in welcomes:
            message = kv_pb2.KvLinkResponse.FromString(bytes.fromhex(welcome))
            parsed.append(kv_link_response_from_proto(message))
        assert all(isinstance(welcome, KVLinkWelcome) for welcome in parsed)
        ranks = tuple(welcome.endpoint.ranks[0] for welcome in parsed)  # type: ignore[union-attr]
        endpoint = replace(parsed[0].endpoint, ranks=ranks)  # type: ignore[union-attr]
        whole = replace(parsed[0], endpoint=endpoint)  # type: ignore[type-var]
        return self.transport.add_peer(whole, self.lost.append)  # type: ignore[arg-type]

    def start_read(self, peer: str, timeout_s: str) -> None:
        """Read the peer's whole pool, the other way round."""
        ids = list(range(NUM_BLOCKS))
        self.transport.read(
            peer, ids, ids[::-1], float(timeout_s), self.landed.on_done, self.landed.on_stall
        )

    def read(self, peer: str) -> tuple[int, str, str]:
        """As start_read; returns how many bytes came, how, and what went wrong."""
        self.landed = Landed()
        self.start_read(peer, "60")
        result = wait_until(lambda: self.landed.results)[0]
        return result.num_bytes, result.transport, result.error

    def state(self) -> dict[str, Any]:
        """Of READs since the last `read`: how they ended, stalls and lost peers."""
        results = [result.error for result in self.landed.results]
        return {"ended": results, "stalls": len(self.landed.stalls), "lost": len(self.lost)}

    def checksums(self) -> tuple[int, ...]:
        return self.ranks.block_checksums(range(NUM_BLOCKS))

    def failure(self) -> str | None:
        return self.transport.failure

    def close(self) -> str | None:
        self.transport.close()
        return self.transport.failure


def main(side: str, *arguments: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what UCX and NIXL say
    worker = PRank(*arguments) if side == "p" else D(*arguments)
    print(worker.welcome, file=answers, flush=True)
    for line in sys.stdin:
        name, *arguments = line.split()  # type: ignore[assignment]
        answer: Any = getattr(worker, name)(*arguments)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
