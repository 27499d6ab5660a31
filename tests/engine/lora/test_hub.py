"""Adapters of a hub, which speaks HTTP on loopback: what it may do, and what it is kept from."""

import http.server
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pdserve_common.model_files.hub_path import HubPath
from pdserve_engine.config import EngineConfig
from pdserve_engine.lora import hub as lora_hub
from pdserve_engine.lora.adapter_config import CONFIG_FILE, WEIGHTS_FILE, LoraError
from pdserve_engine.lora.hub import HubFetch, HubUnreachableError
from support.hub import FakeHub

ADAPTER = "some-owner/Adapter.1"
MAX_WEIGHTS_BYTES = 64 * 1024
WEIGHTS = os.urandom(MAX_WEIGHTS_BYTES // 2)
TIMEOUT_S = 120.0

Handler = http.server.BaseHTTPRequestHandler


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    files = tmp_path / "files"
    files.mkdir()
    (files / CONFIG_FILE).write_text("{}")
    (files / WEIGHTS_FILE).write_bytes(WEIGHTS)
    (files / "adapter_model.bin").write_bytes(b"not to be had")
    hub = FakeHub(files, tmp_path / "home", ADAPTER)
    for name in set(os.environ) - set(hub.environment):
        monkeypatch.delenv(name)
    for name, value in hub.environment.items():
        monkeypatch.setenv(name, value)
    yield hub
    hub.close()


def fetch(revision: str, repository: str = ADAPTER) -> Path:
    path = HubPath(repository=repository, revision=revision)
    return HubFetch(path, max_weights_bytes=MAX_WEIGHTS_BYTES).future.result(TIMEOUT_S)


def refusal(revision: str, repository: str = ADAPTER) -> LoraError:
    with pytest.raises(LoraError) as caught:
        fetch(revision, repository)
    assert str(caught.value).startswith(f"adapter hf://{repository}@{revision}: ")
    return caught.value


def kept(tmp_path: Path) -> set[str]:
    """Return the files that are whole, of those that were downloaded."""
    files = (tmp_path / "home" / "pdserve-adapters").rglob("adapter_*")
    return {path.name for path in files if path.is_file() and ".cache" not in path.parts}


def test_two_files_of_a_commit_come_once(hub: FakeHub) -> None:
    folder = fetch(hub.COMMIT)
    assert {path.name for path in folder.iterdir()} == {CONFIG_FILE, WEIGHTS_FILE, ".cache"}
    assert (folder / WEIGHTS_FILE).read_bytes() == WEIGHTS
    assert not any(path.is_symlink() for path in folder.iterdir())
    hub.requests.clear()
    assert fetch(hub.COMMIT) == folder
    assert hub.requests == []
    # What a name stands for, the hub is asked each time.
    assert fetch("main") == folder
    asked = [each for each in hub.requests if ADAPTER in each]
    assert asked == [f"GET /api/models/{ADAPTER}/revision/main"]


def test_a_commit_that_is_here_needs_no_hub(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch(hub.COMMIT)
    hub.close()
    assert fetch(hub.COMMIT) == folder
    assert isinstance(refusal("main"), HubUnreachableError)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch(hub.COMMIT) == folder
    for revision in ("main", "f" * 40):
        error = refusal(revision)
        assert isinstance(error, HubUnreachableError)
        assert "HF_HUB_OFFLINE is set, and only commits" in str(error)


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_what_is_missing_is_named(hub: FakeHub, tmp_path: Path, name: str) -> None:
    (hub.files / name).unlink()
    error = refusal(hub.COMMIT)
    assert f"{hub.url} has no {name} in it at {hub.COMMIT}" in str(error)
    assert not isinstance(error, HubUnreachableError)
    assert name not in kept(tmp_path)
    # It is there later.
    (hub.files / name).write_bytes(WEIGHTS)
    assert (fetch(hub.COMMIT) / name).read_bytes() == WEIGHTS


def test_who_asks_for_what_is_not_there_is_told(hub: FakeHub) -> None:
    assert f"{hub.url} has no revision 'v2' of {ADAPTER}" in str(refusal("v2"))
    for revision in ("main", "f" * 40):
        text = str(refusal(revision, "some-owner/other"))
        assert f"{hub.url} has no some-owner/other that is open to all" in text
    hub.file_status, hub.file_error = 403, "GatedRepo"
    assert f"{ADAPTER} is gated on {hub.url}" in str(refusal(hub.COMMIT))


@pytest.mark.parametrize(
    ("name", "size"), [(CONFIG_FILE, (1 << 20) + 1), (WEIGHTS_FILE, MAX_WEIGHTS_BYTES + 1)]
)
def test_what_is_too_large_is_not_downloaded(
    hub: FakeHub, tmp_path: Path, name: str, size: int
) -> None:
    (hub.files / name).write_bytes(bytes(size))
    assert f"{name} has more than {size - 1} bytes" in str(refusal(hub.COMMIT))
    assert not any(each.startswith("GET") and each.endswith(name) for each in hub.requests)
    assert name not in kept(tmp_path)


def test_a_hub_that_sends_more_than_it_says_is_cut(hub: FakeHub, tmp_path: Path) -> None:
    sent = 0

    def lie(request: Handler, name: str) -> bool:
        nonlocal sent
        if name != WEIGHTS_FILE or request.command == "HEAD":
            return False
        request.send_response(200)
        for key, value in hub.headers_of(name).items():
            request.send_header(key, value)
        request.end_headers()  # as long as the connection lasts
        while True:
            request.wfile.write(bytes(1 << 20))
            sent += 1

    hub.answer_file = lie
    assert f"{WEIGHTS_FILE} has more than {MAX_WEIGHTS_BYTES} bytes" in str(refusal(hub.COMMIT))
    assert WEIGHTS_FILE not in kept(tmp_path)
    assert all(
        path.stat().st_size <= MAX_WEIGHTS_BYTES
        for path in (tmp_path / "home").rglob("*")
        if path.is_file()
    )


class Elsewhere:
    """Another server, as those are that a hub keeps large files on."""

    def __init__(self, answer: Callable[[Handler], None]) -> None:
        self.authorizations: list[str | None] = []
        elsewhere = self

        class ElsewhereHandler(Handler):
            def do_GET(self) -> None:
                elsewhere.authorizations.append(self.headers["Authorization"])
                answer(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), ElsewhereHandler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/file"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def redirect(hub: FakeHub, location: Callable[[], str]) -> None:
    """Send those who ask for the weights elsewhere."""

    def answer(request: Handler, name: str) -> bool:
        if name != WEIGHTS_FILE:
            return False
        request.send_response(302)
        for key, value in hub.headers_of(name).items():
            request.send_header(key, value)
        request.send_header("X-Linked-Size", str(len(WEIGHTS)))
        request.send_header("Location", location())
        request.send_header("Content-Length", "0")
        request.end_headers()
        return True

    hub.answer_file = answer


def send(body: bytes) -> Callable[[Handler], None]:
    def answer(request: Handler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    return answer


def test_a_file_that_lies_elsewhere_is_had_without_showing_the_token(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    elsewhere = Elsewhere(send(WEIGHTS))
    redirect(hub, lambda: elsewhere.url)
    folder = fetch(hub.COMMIT)
    assert (folder / WEIGHTS_FILE).read_bytes() == WEIGHTS
    assert elsewhere.authorizations == [None]
    elsewhere.close()


@pytest.mark.parametrize("size", [len(WEIGHTS) - 1, 4 * MAX_WEIGHTS_BYTES])
def test_a_file_elsewhere_of_another_size_is_not_kept(
    hub: FakeHub, tmp_path: Path, size: int
) -> None:
    elsewhere = Elsewhere(send(bytes(size)))
    redirect(hub, lambda: elsewhere.url)
    refusal(hub.COMMIT)
    assert WEIGHTS_FILE not in kept(tmp_path)
    elsewhere.close()


def test_no_file_of_this_machine_is_read_for_a_hub(hub: FakeHub, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(WEIGHTS)
    for location in (f"file://{secret}", str(secret)):
        redirect(hub, lambda location=location: location)
        refusal(hub.COMMIT)
        assert WEIGHTS_FILE not in kept(tmp_path)


def test_who_is_sent_round_and_round_gives_up(hub: FakeHub, tmp_path: Path) -> None:
    redirect(hub, lambda: f"{hub.url}/{ADAPTER}/resolve/{hub.COMMIT}/{WEIGHTS_FILE}")
    assert isinstance(refusal(hub.COMMIT), HubUnreachableError)
    assert WEIGHTS_FILE not in kept(tmp_path)


def test_a_hub_that_hangs_has_a_deadline(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora_hub, "FETCH_TIMEOUT_S", 3.0)
    hub.holds_files = True
    error = refusal(hub.COMMIT)
    assert isinstance(error, HubUnreachableError)
    assert "not downloaded within 3 s" in str(error)
    assert kept(tmp_path) == set()
    hub.holds_files = False


def test_who_gives_up_ends_the_download(hub: FakeHub) -> None:
    hub.holds_files = True
    path = HubPath(repository=ADAPTER, revision=hub.COMMIT)
    downloading = HubFetch(path, max_weights_bytes=MAX_WEIGHTS_BYTES)
    deadline = time.monotonic() + TIMEOUT_S
    while not any(each.startswith("GET") for each in hub.requests):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    downloading.cancel()
    with pytest.raises(HubUnreachableError, match="its download was ended by SIGKILL"):
        downloading.future.result(TIMEOUT_S)
    hub.holds_files = False


@pytest.mark.parametrize(
    "path",
    [
        "hf://",
        "hf://owner/name",
        "hf://owner/name@",
        "hf://owner@main",
        "hf://owner/name/more@main",
        "hf://../name@main",
        "hf://owner/..@main",
        "hf://owner/name@../main",
        "hf://owner/name@ma in",
        "hf://owner/name@main\n",
        "hf://owner/name@-x",
        "hf://owner/name@" + "x" * 256,
        "HF://owner/name@main",
        "hf:/owner/name@main",
    ],
)
def test_what_is_no_path_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="must be hf://OWNER/NAME@REVISION"):
        HubPath.parse(path)


def test_a_path_says_what_it_is() -> None:
    path = HubPath.parse("hf://some-owner/Name.1@refs/pr/2")
    assert (path.repository, path.revision) == ("some-owner/Name.1", "refs/pr/2")
    assert str(path) == "hf://some-owner/Name.1@refs/pr/2"


def test_a_config_takes_them_where_the_hub_is_on() -> None:
    lora = ("a=hf://owner/name@main",)
    with pytest.raises(ValueError, match="lora has 'hf://owner/name@main', lora_hub must be true"):
        EngineConfig(lora=lora)
    with pytest.raises(ValueError, match="lora has 'hf://owner/name', whose revision is missing"):
        EngineConfig(lora=("a=hf://owner/name",), lora_hub=True)
    config = EngineConfig(lora=lora, lora_hub=True)
    assert config.adapter_paths == {"a": "hf://owner/name@main"}
    assert EngineConfig(lora_hub=True).has_adapters
