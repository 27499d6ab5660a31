"""Fixtures shared by the suites: small random models and what transformers generates with them."""

import functools
import hashlib
import http.server
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# The same examples in every run, on a machine however busy: a run must not fail by chance.
settings.register_profile(
    "pdserve", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("pdserve")

# UCX takes all network devices that it finds at its start, and READs hang when one of them is gone.
# Those of the fault tests' networks come and go beside other tests.
os.environ.setdefault("UCX_NET_DEVICES", "lo")

SMALL_SHAPE = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
CONFIG_CLASSES = {
    "LlamaForCausalLM": "LlamaConfig",
    "MistralForCausalLM": "MistralConfig",
    "Qwen2ForCausalLM": "Qwen2Config",
    "Qwen3ForCausalLM": "Qwen3Config",
    "Gemma2ForCausalLM": "Gemma2Config",
    "Gemma3ForCausalLM": "Gemma3TextConfig",
    "GPTNeoXForCausalLM": "GPTNeoXConfig",
    "GptOssForCausalLM": "GptOssConfig",
    "MixtralForCausalLM": "MixtralConfig",
    "Olmo2ForCausalLM": "Olmo2Config",
    "OPTForCausalLM": "OPTConfig",
    "Phi3ForCausalLM": "Phi3Config",
    "Qwen3MoeForCausalLM": "Qwen3MoeConfig",
}
# They have no such fields, and would keep what they are given.
NO_GQA = ("GPTNeoXForCausalLM", "OPTForCausalLM")
# Their norms multiply by 1 + weight.
CENTERED_NORMS = ("Gemma2ForCausalLM", "Gemma3ForCausalLM")
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SERVED_VOCAB_SIZE = 300
# Large enough that greedy text does not settle on one token.
WEIGHT_STD = 0.35


class CertificateAuthority:
    """Signs certificates for a test, by the openssl command."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.ca_file = str(folder / "ca.crt")
        self._run("req", "-x509", *_NEW_KEY, "-keyout", "ca.key", "-out", "ca.crt", "-subj=/CN=CA")

    def issue(self, name: str, subject_alt_name: str) -> tuple[str, str]:
        """Return the files of a new certificate, valid as a server's and a client's, and its key.
        With the same name again they are overwritten.
        """
        (self._folder / "extensions").write_text(
            f"subjectAltName={subject_alt_name}\nextendedKeyUsage=serverAuth,clientAuth\n"
        )
        cert, key, request = f"{name}.crt", f"{name}.key", f"{name}.csr"
        self._run("req", *_NEW_KEY, "-keyout", key, "-out", request, f"-subj=/CN={name}")
        signing = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial")
        self._run("x509", "-req", "-in", request, *signing, "-extfile", "extensions", "-out", cert)
        return str(self._folder / cert), str(self._folder / key)

    def encrypted(self, key: Path) -> str:
        """Return a key (PEM) as it is with a passphrase."""
        return self._run("ec", "-in", str(key), "-aes256", "-passout", "pass:secret")

    def _run(self, *args: str) -> str:
        command = ["openssl", *args]
        done = subprocess.run(
            command, cwd=self._folder, check=True, capture_output=True, text=True, timeout=120
        )
        return done.stdout


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


@pytest.fixture(scope="session")
def make_certificate_authority(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[], CertificateAuthority]:
    """Skips the test where there is no openssl command."""
    if shutil.which("openssl") is None:
        pytest.skip("certificates are made by the openssl command")
    return lambda: CertificateAuthority(tmp_path_factory.mktemp("ca"))


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
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # clients that are gone
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
            while self.holds_files and request.command == "GET":
                time.sleep(0.05)
            name = path.removeprefix(files)
            headers = {"ETag": f'"{_etag(name)}"', "X-Repo-Commit": self.COMMIT}
            self._send(request, 200, headers, (self.files / name).read_bytes())
        else:
            # To who has no token the hub does not tell whether others have it.
            self._send(request, 401, {"X-Error-Code": "RepoNotFound"})

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


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    """A hub with the bundled model in it, and files beside it that nobody serves from."""
    files = tmp_path / "hub-files"
    shutil.copytree(Path(__file__).parent.parent / "models" / "pdserve-tiny", files)
    for name in ("pytorch_model.bin", "code.py", "consolidated.safetensors", "onnx/a.json"):
        (files / name).parent.mkdir(exist_ok=True)
        (files / name).write_bytes(b"not to be had")
    hub = FakeHub(files, tmp_path / "hub-home")
    yield hub
    hub.close()


def pytest_configure() -> None:
    """A shell starts what it puts in the background with SIGINT ignored; children would inherit
    that, and no test could interrupt them.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make_model(architecture, *, shard_size=None, dtype="float32", **config_overrides) -> folder.

    Small models with random weights, biases and norms; the same arguments give the same folder.
    """
    import torch

    folders: dict[str, Path] = {}

    def make(
        architecture: str = "LlamaForCausalLM",
        *,
        shard_size: str | None = None,
        dtype: str = "float32",
        **overrides: Any,
    ) -> Path:
        key = json.dumps([architecture, shard_size, dtype, overrides], sort_keys=True)
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("model")
            model = _build(architecture, overrides).to(getattr(torch, dtype))
            model.save_pretrained(folders[key], max_shard_size=shard_size or "5GB")
        return folders[key]

    return make


@pytest.fixture(scope="session")
def make_served_model(make_model: Callable[..., Path]) -> Callable[..., Path]:
    """make_model's random models with what a router needs besides: a byte-level tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    def make(architecture: str, **overrides: object) -> Path:
        folder = make_model(architecture, vocab_size=SERVED_VOCAB_SIZE, **overrides)
        if not (folder / "tokenizer.json").exists():
            alphabet = sorted(ByteLevel.alphabet())
            vocab = {"<bos>": 0, "<eos>": 1} | {char: i + 2 for i, char in enumerate(alphabet)}
            tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
            tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
            tokenizer.decoder = ByteLevelDecoder()
            tokenizer.add_special_tokens(["<bos>", "<eos>"])
            fast = PreTrainedTokenizerFast(
                tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>"
            )
            fast.chat_template = CHAT_TEMPLATE
            fast.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def hf_model() -> Callable[..., Any]:
    """hf_model(model_dir, dtype="float32") -> the transformers model, which never stops early."""

    @functools.cache
    def load(model_dir: Path, dtype: str = "float32") -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype))
        model.generation_config.eos_token_id = None
        return model.eval()

    return load


@pytest.fixture(scope="session")
def hf_greedy(hf_model: Callable[..., Any]) -> Callable[[Path, list[int], int], list[int]]:
    """hf_greedy(model_dir, prompt_token_ids, n) -> the n tokens transformers generates in fp32."""

    def generate(model_dir: Path, prompt_token_ids: list[int], n: int) -> list[int]:
        import torch

        prompt = torch.tensor([prompt_token_ids])
        generated = hf_model(model_dir).generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=n,
            do_sample=False,
            pad_token_id=0,
        )
        return generated[0, len(prompt_token_ids) :].tolist()

    return generate


def _build(architecture: str, overrides: dict[str, Any]) -> Any:
    import torch
    import transformers

    config_class = getattr(transformers, CONFIG_CLASSES[architecture])
    fields: dict[str, Any] = SMALL_SHAPE | {"tie_word_embeddings": False} | overrides
    if architecture == "MistralForCausalLM":
        fields = {"sliding_window": None} | fields
    if architecture in NO_GQA:
        fields = {k: v for k, v in fields.items() if k not in ("num_key_value_heads", "head_dim")}
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(config_class(**fields))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(std=WEIGHT_STD)
            if name.endswith("norm.weight") and architecture not in CENTERED_NORMS:
                weight.add_(1.0)
    return model
