"""A stand-in for the Hugging Face hub, on loopback."""

import hashlib
import http.server
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class FakeHub:
    """Speaks the part of the Hugging Face hub's API that downloads use, over one model's files."""

    COMMIT = "0123456789abcdef0123456789abcdef01234567"

    def __init__(self, files: Path, home: Path, model: str = "some-owner/Tiny.Model-1") -> None:
        self.model = model
        self.files = files
        # What files are answered with, where it is not themselves.
        self.file_status: int | None = None
        self.file_error = ""
        self.requests: list[str] = []
        self.holds_files = False
        # Answers a request for a file by its name, if it returns True.
        self.answer_file: Callable[[http.server.BaseHTTPRequestHandler, str], bool] = (
            lambda request, name: False
        )
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients that are gone
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        names = ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE", "HTTP_PROXY", "http_proxy")
        self.environment = {
            **{name: value for name, value in os.environ.items() if name not in names},
            **{"HF_ENDPOINT": self.url, "HF_HOME": str(home)},
        }

    def close(self) -> None:
        """Nothing listens there any more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        path = request.path.split("?")[0]
        self.requests.append(f"{request.command} {path}")
        api, files = f"/api/models/{self.model}", f"/{self.model}/resolve/{self.COMMIT}/"
        names = sorted(str(path.relative_to(self.files)) for path in self._all_files())
        if path in (api, f"{api}/revision/main", f"{api}/revision/{self.COMMIT}"):
            siblings = [{"rfilename": name} for name in names]
            self._send_json(request, {"id": self.model, "sha": self.COMMIT, "siblings": siblings})
        elif path == f"{api}/tree/{self.COMMIT}":
            sizes = {name: (self.files / name).stat().st_size for name in names}
            tree = [
                {"type": "file", "path": name, "size": size, "oid": _etag(name)}
                for name, size in sizes.items()
            ]
            self._send_json(request, tree)
        elif path.startswith(api):
            self._send(request, 404, {"X-Error-Code": "RevisionNotFound"})
        elif self.file_status is not None:
            self._send(request, self.file_status, {"X-Error-Code": self.file_error})
        elif path.startswith(files) and path.removeprefix(files) in names:
            if self.answer_file(request, path.removeprefix(files)):
                return
            while self.holds_files and request.command == "GET":
                time.sleep(0.05)
            name = path.removeprefix(files)
            headers = self.headers_of(name)
            self._send(request, 200, headers, (self.files / name).read_bytes())
        elif path.startswith(files):
            self._send(request, 404, {"X-Error-Code": "EntryNotFound"})
        else:
            # To who has no token the hub does not tell whether others have it.
            self._send(request, 401, {"X-Error-Code": "RepoNotFound"})

    def file_requests(self) -> list[str]:
        """Return the requests for files, as METHOD PATH."""
        return [each for each in self.requests if f" /{self.model}/resolve/" in each]

    def headers_of(self, name: str) -> dict[str, str]:
        """Return what the hub says of a file, besides its size."""
        return {"ETag": f'"{_etag(name)}"', "X-Repo-Commit": self.COMMIT}

    def _all_files(self) -> list[Path]:
        return [path for path in self.files.rglob("*") if path.is_file()]

    def _send_json(self, request: http.server.BaseHTTPRequestHandler, value: object) -> None:
        headers = {"Content-Type": "application/json"}
        self._send(request, 200, headers, json.dumps(value).encode())

    def _send(
        self,
        request: http.server.BaseHTTPRequestHandler,
        status: int,
        headers: dict[str, str],
        body: bytes = b"",
    ) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(body)


def _etag(name: str) -> str:
    return hashlib.sha1(name.encode()).hexdigest()
