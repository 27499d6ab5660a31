"""Brings what the chart repeats up to date: `python tools/update_chart.py`.

The schemas of `config` in helm/values.schema.json follow the processes' dataclasses, those of
objectives the buckets of metrics, those of alerts helm/files/rules.yaml. The table of values in
helm/README.md follows the comments of helm/values.yaml, which are helm-docs'. The rest of both
files is written by hand. helm/alerts/pdserve.yaml, for a Prometheus without the operator, is
helm/files/rules.yaml with the numbers of helm/values.yaml.
"""

import dataclasses
import json
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from pdserve_common.metrics.buckets import TOKEN_BUCKETS, TTFT_BUCKETS
from pdserve_decode.config import DecodeConfig
from pdserve_prefill.config import PrefillConfig
from pdserve_router.config import RouterConfig

CHART = Path(__file__).parent.parent / "helm"
# Fields that the chart sets from other values, or has of its own.
OWNED = {
    "model",
    "revision",
    "served_model_name",
    "host",
    "port",
    "grpc_port",
    "http_port",
    "metrics_port",
    "engine_id",
    "router_id",
    "prefill",
    "decode",
    "tls_cert_file",
    "tls_key_file",
    "tls_ca_file",
    "tls_server_name",
    "api_keys_file",
    "otlp_traces_endpoint",
    "kv_offload_disk_path",
    "kv_offload_disk_bytes",
}
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}
_DOC = "# -- "
RULES = CHART / "files" / "rules.yaml"
_SWITCH = {"enabled": {"type": "boolean"}}
_COUNT = {"minCount": {"type": "integer", "minimum": 0}}
_MADE = "# Made from helm/files/rules.yaml by `make chart`: change that.\n"


class Value(NamedTuple):
    """One documented key of values.yaml."""

    path: str
    default: Any
    text: str


def main() -> None:
    """Rewrite these files."""
    schema = CHART / "values.schema.json"
    schema.write_text(update_schema(schema.read_text()))
    readme = CHART / "README.md"
    readme.write_text(update_readme(readme.read_text()))
    (CHART / "alerts" / "pdserve.yaml").write_text(plain_rules())


def update_schema(text: str) -> str:
    """Return the schema with the fields that `config` may have now."""
    assert fields_of(PrefillConfig) == fields_of(DecodeConfig), "one schema serves both pools"
    schema = json.loads(text)
    schema["definitions"]["routerConfig"] = fields_of(RouterConfig)
    schema["definitions"]["workerConfig"] = fields_of(PrefillConfig)
    schema["definitions"]["objectives"] = _object(
        {
            "ttftSeconds": {"enum": list(TTFT_BUCKETS)},
            "firstItlSeconds": {"enum": list(TOKEN_BUCKETS)},
            "itlSeconds": {"enum": list(TOKEN_BUCKETS)},
            "missedRatio": {"type": "number", "exclusiveMinimum": 0, "maximum": 0.05},
        }
    )
    schema["definitions"]["alerts"] = _object(
        {name: _object(_SWITCH | (_COUNT if has_count else {})) for name, has_count in alerts()}
    )
    return json.dumps(schema, indent=2) + "\n"


def fields_of(cls: type[Any]) -> dict[str, Any]:
    """Return the JSON schema of a `config` map whose keys are fields of `cls`."""
    hints = typing.get_type_hints(cls)
    properties = {
        field.name: {"description": field.metadata["help"], **_schema_of(hints[field.name])}
        for field in dataclasses.fields(cls)
        if field.name not in OWNED
    }
    return {"type": "object", "additionalProperties": False, "properties": properties}


def alerts() -> list[tuple[str, bool]]:
    """Return the names of all alerts, and whether they have a minimum count."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    return [(rule["alert"], "<<minCount>>" in rule["expr"]) for rule in rules]


def plain_rules() -> str:
    """Return the rules with the numbers of values.yaml, in the text: comments stay."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())["prometheusRule"]
    name, lines = "", [_MADE]
    for line in RULES.read_text().splitlines(keepends=True):
        name = line.split()[-1] if line.strip().startswith("- alert: ") else name
        numbers = {**values["objectives"], **values["alerts"].get(name, {})}
        for key, value in numbers.items():
            number = str(float(value)) if key.endswith("Seconds") else json.dumps(value)
            line = line.replace(f"<<{key}>>", number)
        lines.append(line)
    return "".join(lines)


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object that has all of these, and nothing else."""
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "required": list(properties),
    }


def update_readme(text: str) -> str:
    """Return the README with the table of values as they are now. Raises ValueError if it has no
    place for it.
    """
    before, heading, after = text.partition("## Values\n")
    if not heading:
        raise ValueError("README.md has no heading ## Values")
    _, next_heading, rest = after.partition("\n## ")
    return before + heading + "\n" + values_table() + next_heading + rest


def values_table() -> str:
    """Return the table as helm-docs would write it."""
    rows = ["| Key | Type | Default | Description |", "|-----|------|---------|-------------|"]
    for value in documented_values((CHART / "values.yaml").read_text()):
        default = json.dumps(value.default, separators=(",", ":")).replace("|", "\\|")
        text = value.text.replace("|", "\\|")
        rows.append(f"| {value.path} | {_type_of(value.default)} | `{default}` | {text} |")
    return "\n".join(rows) + "\n"


def documented_values(text: str) -> Iterator[Value]:
    """Yield the keys of values.yaml under a `# -- ` comment, in the file's order."""
    values = yaml.safe_load(text)
    keys: list[str] = []
    comment: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith(_DOC) or (comment and stripped.startswith("# ")):
            comment.append(stripped.removeprefix(_DOC).removeprefix("# "))
            continue
        name, colon, _ = stripped.partition(":")
        if colon and not stripped.startswith(("#", "-")):
            keys[(len(line) - len(line.lstrip())) // 2 :] = [name]
            if comment:
                yield Value(".".join(keys), _at(values, keys), " ".join(comment))
        comment = []


def _at(values: Any, keys: list[str]) -> Any:
    for key in keys:
        values = values[key]
    return values


def _schema_of(hint: Any) -> dict[str, Any]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = (arg for arg in typing.get_args(hint) if arg is not type(None))
    if typing.get_origin(hint) is typing.Literal:
        return {"enum": list(typing.get_args(hint))}
    if typing.get_origin(hint) is tuple:
        return {"type": "array", "items": _schema_of(typing.get_args(hint)[0])}
    return {"type": _TYPES[hint]}


def _type_of(default: Any) -> str:
    names = {bool: "bool", int: "int", float: "float", str: "string", list: "list", dict: "object"}
    return names[type(default)]


if __name__ == "__main__":
    main()
