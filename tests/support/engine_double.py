"""The front of an engine of which the test says what it brings."""

from collections.abc import Sequence

from pdserve_common.errors import DrainingError
from pdserve_common.types.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineInfo,
    WorkerRole,
)
from pdserve_common.types.engine_client import NO_TENSORS, OutputsCallback, Tensors
from support.fake_worker import engine_info


class EngineDouble:
    """Keeps what it gets, and brings what the test emits."""

    def __init__(self, info: EngineInfo | None = None) -> None:
        self.info = info or engine_info(WorkerRole.DECODE, vocab_size=100)
        self.clients: dict[int, OutputsCallback] = {}
        self.added: list[tuple[EngineCoreRequest, Tensors]] = []
        self.aborted: list[str] = []
        self.is_draining = False

    def record_kv_cache_events(self, on_events: object) -> None:
        pass

    def register_client(self, on_outputs: OutputsCallback) -> int:
        index = len(self.clients)
        self.clients[index] = on_outputs
        return index

    def unregister_client(self, client_index: int) -> None:
        del self.clients[client_index]

    def add_request(self, request: EngineCoreRequest, tensors: Tensors = NO_TENSORS) -> None:
        if self.is_draining:
            raise DrainingError("no more")
        self.added.append((request, tensors))

    def abort_requests(self, client_index: int, request_ids: Sequence[str]) -> None:
        self.aborted.extend(request_ids)

    def emit(self, output: EngineCoreOutput) -> None:
        for on_outputs in list(self.clients.values()):
            on_outputs(EngineCoreOutputs(outputs=(output,)))
