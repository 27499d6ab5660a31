"""Each client, its defaults where it has any, against one running stack: zero failures."""

import json
from collections.abc import Callable
from pathlib import Path

from environments import MODEL, NPM, ROOT, SCRIPTS, command_of

from pdserve_client.stack import Stack

RunClient = Callable[..., str]

LM_EVAL_TASK = """\
task: tiny
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""


def url(stack: Stack) -> str:
    return f"http://127.0.0.1:{stack.http_port}"


def test_openai_python(stack: Stack, run_client: RunClient) -> None:
    command = [command_of("openai"), SCRIPTS / "openai_sdk.py", url(stack), MODEL.name]
    run_client("openai (Python)", command)


def test_openai_npm(stack: Stack, run_client: RunClient) -> None:
    run_client("openai (npm)", ["node", SCRIPTS / "openai_sdk.cjs", url(stack), MODEL.name])


def test_the_example_in_typescript(stack: Stack, run_client: RunClient) -> None:
    # It has no types, so it is JavaScript as well; packages are found beside a module.
    module = NPM / "chat.mjs"
    module.write_text((ROOT / "examples" / "chat.ts").read_text())
    version = "console.log('version', process.versions.node)"
    command = f'node -e "{version}" && PDSERVE_URL={url(stack)} node {module}'
    assert "tokens)" in run_client("examples/chat.ts (node)", ["sh", "-c", command])


def test_langchain(stack: Stack, run_client: RunClient) -> None:
    script = SCRIPTS / "langchain_chat.py"
    run_client("langchain-openai", [command_of("langchain-openai"), script, url(stack), MODEL.name])


def test_litellm(stack: Stack, run_client: RunClient) -> None:
    command = [command_of("litellm"), SCRIPTS / "litellm_turns.py", url(stack), MODEL.name]
    run_client("litellm", command)


def test_grpc_js(stack: Stack, run_client: RunClient) -> None:
    script = SCRIPTS / "grpc_generate.cjs"
    run_client("grpc-js", ["node", script, stack.grpc_address, MODEL.name, ROOT / "protos"])


def test_curl(stack: Stack, run_client: RunClient) -> None:
    """The commands of docs/clients.md."""
    commands = (ROOT / "docs" / "clients.md").read_text().split("```sh\n")[1].split("```")[0]
    script = "curl --version | sed -n 's/^curl \\([^ ]*\\).*/version \\1/p'\nset -e\n"
    script += commands.replace("http://127.0.0.1:8000", url(stack))
    output = run_client("curl", ["sh", "-c", script])
    assert '"chat.completion"' in output
    assert output.rstrip().endswith("data: [DONE]")


def test_guidellm_with_its_defaults(stack: Stack, run_client: RunClient, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [
        command_of("guidellm", "guidellm"),
        *("run", "--backend", f"kind=openai_http,target={url(stack)}"),
        *("--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=4"),
        *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"),
        *("--tokenizer", f"kind=huggingface_auto,model={MODEL}"),
        *("--output", f"kind=json,path={report}", "--disable-progress"),
    ]
    run_client("guidellm", command)
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    # It ends with 0 also where none was served.
    assert (totals["successful"], totals["errored"]) == (4, 0)


def test_lm_eval_in_batches(stack: Stack, run_client: RunClient, tmp_path: Path) -> None:
    data = tmp_path / "tiny.jsonl"
    with data.open("w") as lines:
        for number in range(10):
            question = {"question": f"{number} and {number} is", "choices": [" even", " odd"]}
            lines.write(json.dumps({**question, "answer": 0}) + "\n")
    (tmp_path / "tiny.yaml").write_text(LM_EVAL_TASK.format(data=data))
    arguments = {
        "model": MODEL.name,
        "base_url": f"{url(stack)}/v1/completions",
        "tokenizer": MODEL,
        "tokenizer_backend": "huggingface",
        "num_concurrent": 2,
        "max_retries": 1,
    }
    command = [
        command_of("lm_eval", "lm_eval"),
        *("--model", "local-completions", "--tasks", "tiny", "--include_path", tmp_path),
        *("--model_args", ",".join(f"{key}={value}" for key, value in arguments.items())),
        *("--batch_size", "4", "--output_path", tmp_path / "results"),
    ]
    run_client("lm_eval", command)
    (path,) = (tmp_path / "results").rglob("results_*.json")
    assert "acc,none" in json.loads(path.read_text())["results"]["tiny"]


def test_schemathesis_sees_documented_codes_only(stack: Stack, run_client: RunClient) -> None:
    checks = "status_code_conformance,content_type_conformance,response_schema_conformance"
    command = [
        command_of("schemathesis", "schemathesis"),
        *("run", f"{url(stack)}/openapi.json", "--max-examples", "40", "--seed", "1"),
        *("--checks", checks),
    ]
    run_client("schemathesis", command)
    # 500 is documented too, but must not come: the router logs why it did.
    log = stack.router.log_path.read_text()
    assert not [line for line in log.splitlines() if json.loads(line)["level"] == "ERROR"]
