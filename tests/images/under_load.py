"""Clients that ask one after another while a test breaks or replaces something."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import grpc
import httpx
import openai
from containers import wait_for

from pdserve_client.client import Client
from pdserve_common.types.sampling_params import SamplingParams

MODEL = "pdserve-tiny"
MAX_TOKENS = 200
PROMPTS = (
    "Once upon a time, there was a small boat on a wide blue lake. One windy morning",
    "Lily had a red kite. She ran up the hill with her brother, and then",
    "The old clock in the tower had stopped. Nobody knew why, until one day a girl named Mia",
)
TIMEOUT_S = 60.0
# A client asks again at once: so many answers at least lie between two looks at them.
NUM_ANSWERS = 6


class Answer(NamedTuple):
    """What a client got."""

    prompt: str
    text: str
    error: str


Ask = Callable[[str], Answer]


@contextlib.contextmanager
def openai_client(address: str) -> Iterator[Ask]:
    """Ask a router with OpenAI's SDK, which is to hide no failure."""
    with openai.OpenAI(
        base_url=f"http://{address}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S
    ) as client:

        def ask(prompt: str) -> Answer:
            text, reason = "", None
            try:
                for chunk in client.completions.create(
                    model=MODEL,
                    prompt=prompt,
                    temperature=0,
                    max_tokens=MAX_TOKENS,
                    stream=True,
                    extra_body={"ignore_eos": True},
                ):
                    for choice in chunk.choices:
                        text += choice.text
                        reason = choice.finish_reason or reason
            except (openai.APIError, httpx.HTTPError) as error:
                return Answer(prompt, text, repr(error))
            return Answer(prompt, text, "" if reason == "length" else f"ended with {reason}")

        yield ask


@contextlib.contextmanager
def pdserve_client(addresses: list[str]) -> Iterator[Ask]:
    """Ask with our client, which goes on at another router when one is lost."""
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    with Client(addresses) as client:

        def ask(prompt: str) -> Answer:
            text, error = "", "without an end"
            try:
                for output in client.generate(prompt, params, timeout_s=TIMEOUT_S):
                    for completion in output.outputs:
                        text += completion.text
                        if completion.HasField("error"):
                            return Answer(prompt, text, completion.error.message)
                    error = "" if output.finished else error
            except grpc.RpcError as broken:
                return Answer(prompt, text, f"{broken.code().name}: {broken.details()}")
            return Answer(prompt, text, error)

        yield ask


@dataclass(slots=True)
class Load:
    """Requests under way; use as a context manager. One client for each of PROMPTS."""

    ask: Ask
    expected: dict[str, str]
    answers: list[Answer] = field(default_factory=list)
    _is_over: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> "Load":
        self._threads = [threading.Thread(target=self._run, args=(p,)) for p in PROMPTS]
        for thread in self._threads:
            thread.start()
        self.wait_for_answers()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def wait_for_answers(self) -> None:
        """Wait until some more have come."""
        enough = len(self.answers) + NUM_ANSWERS
        wait_for(lambda: len(self.answers) >= enough, 2 * TIMEOUT_S, lambda: str(self.failed()))

    def wrong(self) -> list[Answer]:
        """Return answers with something in them that nobody has generated."""
        return [a for a in self.answers if not self.expected[a.prompt].startswith(a.text)]

    def failed(self) -> list[Answer]:
        """Return answers that are not whole."""
        return [a for a in self.answers if a.error or a.text != self.expected[a.prompt]]

    def _run(self, prompt: str) -> None:
        while not self._is_over.is_set():
            self.answers.append(self.ask(prompt))
