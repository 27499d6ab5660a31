"""What gRPC's core writes to stderr itself."""

import os
import subprocess
import sys

import pytest

# A server that gets a GOAWAY with an error, as from a peer that cancels all calls, and then cannot
# have a port.
PEER_THAT_GOES = """
import asyncio, sys
sys.argv = ["test", "--help"]
try:
    __import__("{module}", fromlist=["main"]).main()
except SystemExit:
    pass
import grpc

def frame(kind, payload):
    return len(payload).to_bytes(3, "big") + bytes([kind, 0]) + bytes(4) + payload

async def run():
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    preface = b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n"
    goaway = frame(7, bytes(4) + (2).to_bytes(4, "big"))
    writer.write(preface + frame(4, b"") + goaway + frame(6, b"all read"))
    await asyncio.wait_for(reader.readuntil(b"all read"), 30)
    writer.close()
    try:
        grpc.aio.server(options=[("grpc.so_reuseport", 0)]).add_insecure_port(f"127.0.0.1:{{port}}")
    except RuntimeError:
        pass
    await server.stop(0)

asyncio.run(run())
"""
MODULES = [f"pdserve_{name}.__main__" for name in ("router", "prefill", "decode", "client")]


def stderr_of(module: str, **environ: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    result = subprocess.run(
        [sys.executable, "-c", PEER_THAT_GOES.format(module=module)],
        env={**inherited, **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return result.stderr


@pytest.mark.parametrize("module", MODULES)
def test_what_peers_do_is_not_written_and_errors_of_our_own_are(module: str) -> None:
    stderr = stderr_of(module)
    assert "goaway" not in stderr
    assert "Failed to add port" in stderr


def test_the_environment_decides() -> None:
    assert "Got goaway [2]" in stderr_of(MODULES[0], GRPC_VERBOSITY="info")
    assert "Failed to add port" not in stderr_of(MODULES[0], GRPC_VERBOSITY="none")
