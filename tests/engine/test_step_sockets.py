"""The engine's end of the steps' sockets: ranks read late, and several threads send."""

import random
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pdserve_common.processes.calls import Answer
from pdserve_engine.executor import messages
from pdserve_engine.executor.messages import Message
from pdserve_engine.executor.step_sockets import StepSockets

TIMEOUT_S = 60.0
NUM_FRAMES = 1000
# More of them than a socket holds are on their way all the time.
MAX_BYTES, NUM_ON_THEIR_WAY = 1 << 17, 8
NO_GRAMMAR: Any = None


def test_what_several_threads_send_comes_whole_and_in_order() -> None:
    codec = messages.make_codec(NO_GRAMMAR)
    ours, theirs = socket.socketpair()
    theirs.settimeout(TIMEOUT_S)
    sockets = StepSockets([ours], codec)
    numbering = threading.Lock()
    room = threading.Semaphore(NUM_ON_THEIR_WAY)
    taken: list[tuple[Message, int]] = []

    def send_all(sender: int) -> None:
        rng = random.Random(sender)
        for number in range(NUM_FRAMES):
            assert room.acquire(timeout=TIMEOUT_S)
            frame = codec.encode(Answer(bytes([sender]) * rng.randint(1, MAX_BYTES)), number)
            with numbering:
                sockets.send(0, frame)

    def read_all() -> None:
        reader = codec.reader()
        while len(taken) < 2 * NUM_FRAMES:
            for each in reader.feed(theirs.recv(1 << 16)):
                taken.append(each)
                room.release()

    with ours, theirs, ThreadPoolExecutor(3) as pool:
        running = [pool.submit(send_all, 0), pool.submit(send_all, 1), pool.submit(read_all)]
        while not all(each.done() for each in running):
            sockets.wait(0.001)
            for each in running:
                if each.done():
                    each.result()
    for sender in range(2):
        found = [(m.result, number) for m, number in taken if isinstance(m, Answer)]
        numbers = [number for result, number in found if set(result) == {sender}]
        assert numbers == [*range(NUM_FRAMES)]
