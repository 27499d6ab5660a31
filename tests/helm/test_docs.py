"""Helm commands of the docs work as they are written, and images are there before them."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from helm_chart import CHART, ROOT, helm, pod_specs, render

from pdserve_common.version import VERSION

PAGES = sorted(
    page for pattern in ("*.md", "docs/**/*.md", "helm/*.md") for page in ROOT.glob(pattern)
)
BLOCK = re.compile(r"^```\w*\n(.*?)^```|((?:^    .*\n|^\n)+)", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(helm (?:install|upgrade) [^`]*-[^`]*)`")
# Those of our commands, with whether a value follows.
FLAGS = {
    "--wait": False,
    "--reset-then-reuse-values": False,
    "--timeout": True,
    "--set": True,
    "-f": True,
}
WARNING = 2


class Command(NamedTuple):
    """One `helm install` or `upgrade`, and what its block of commands did before it."""

    page: Path
    words: list[str]
    before: list[str]

    @property
    def name(self) -> str:
        return self.words[2]

    def values(self) -> dict[str, Any]:
        """Return what its flags say, in their order. Raises ValueError for an unknown flag."""
        values: dict[str, Any] = {}
        words = iter(self.words[4:])
        for flag in words:
            if flag not in FLAGS:
                raise ValueError(f"{self.page}: {flag} of {' '.join(self.words)}")
            value = next(words) if FLAGS[flag] else ""
            if flag == "-f":
                values = merged(values, yaml.safe_load((ROOT / value).read_text()))
            elif flag == "--set":
                values = merged(values, helm().parse_set_string(value))
        return values


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    both = dict(one)
    for key, value in other.items():
        is_map = isinstance(value, dict) and isinstance(both.get(key), dict)
        both[key] = merged(both[key], value) if is_map else value
    return both


def commands() -> Iterator[Command]:
    for page in PAGES:
        text = page.read_text()
        for fenced, indented in BLOCK.findall(text):
            yield from commands_of(page, fenced or indented)
        for inline in INLINE.findall(re.sub(r"\s+", " ", text)):
            yield Command(page, shlex.split(inline), [])


def commands_of(page: Path, block: str) -> Iterator[Command]:
    variables: dict[str, str] = {}
    before: list[str] = []
    for line in block.replace("\\\n", " ").splitlines():
        command = line.split(" #")[0].strip()
        if assigned := re.fullmatch(r"([A-Z]+)=(\S+)", command):
            variables[assigned[1]] = assigned[2]
        for name, value in variables.items():
            command = command.replace(f"${name}", value)
        if command.startswith(("helm install ", "helm upgrade ")):
            yield Command(page, shlex.split(command), list(before))
        before.append(command)


COMMANDS = list(commands())


def name_of(command: Command) -> str:
    return f"{command.page.relative_to(ROOT)}: {' '.join(command.words[1:3])}"


def test_the_docs_say_how_to_install() -> None:
    installed = {command.page.name for command in COMMANDS if command.words[1] == "install"}
    assert {"kubernetes.md", "README.md"} <= installed
    assert {command.words[1] for command in COMMANDS} == {"install", "upgrade"}


@pytest.mark.parametrize("command", COMMANDS, ids=name_of)
def test_the_chart_takes_what_the_docs_say(command: Command) -> None:
    assert (ROOT / command.words[3]).resolve() == CHART
    values = command.values()
    assert render(values, name=command.name)
    found = helm().lint(str(CHART), values, strict=True)["messages"]
    assert not [message for message in found if message["severity"] >= WARNING]


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.words[1] == "install"], ids=name_of)
def test_images_are_built_and_brought_to_the_nodes_before_they_are_installed(
    command: Command,
) -> None:
    manifests = render(command.values(), name=command.name)
    images = {
        each["image"]
        for spec in pod_specs(manifests)
        for each in (*spec["containers"], *spec.get("initContainers", ()))
    }
    assert images
    brought = {
        image
        for line in command.before
        if line.startswith(("kind load docker-image ", "docker push "))
        for image in line.split()[2:]
        if not image.startswith("docker-image")
    }
    assert images <= brought
    tags = tags_of(command.before)
    assert {tags.get(image, image) for image in images} <= built_images(command.before)


def tags_of(lines: list[str]) -> dict[str, str]:
    """Names that images were given, and what they were called before."""
    pairs = (line.split()[2:] for line in lines if line.startswith("docker tag "))
    return {name: image for image, name in pairs}


def built_images(lines: list[str]) -> set[str]:
    """What `make images` makes, as the Makefile names it."""
    variants = [
        line.partition("VARIANT=")[2] or "cpu" for line in lines if line.startswith("make images")
    ]
    workers = {f"pdserve-worker:{VERSION}-{variant}" for variant in variants}
    return workers | {f"pdserve-router:{VERSION}"} if variants else set()


def test_releases_are_installed_before_they_are_upgraded() -> None:
    pages = {command.page for command in COMMANDS}
    names = {command.name for command in COMMANDS if command.words[1] == "install"}
    assert len(pages) > 1
    assert {command.name for command in COMMANDS} <= names


def test_what_triton_compiles_lies_on_the_volume_of_the_docs() -> None:
    text = (ROOT / "docs/kubernetes.md").read_text()
    (block,) = re.findall(
        r"^  ```yaml\n(.*?TRITON_CACHE_DIR.*?)^  ```", text, re.MULTILINE | re.DOTALL
    )
    workers = [
        spec
        for spec in pod_specs(render(yaml.safe_load(block)))
        if spec["containers"][0]["name"] in ("prefill", "decode")
    ]
    assert len(workers) == 2
    for spec in workers:
        (container,) = spec["containers"]
        (folder,) = (e["value"] for e in container["env"] if e["name"] == "TRITON_CACHE_DIR")
        (mount,) = (m for m in container["volumeMounts"] if m["mountPath"] == folder)
        (volume,) = (v for v in spec["volumes"] if v["name"] == mount["name"])
        assert volume["persistentVolumeClaim"]["claimName"]
        assert not mount.get("readOnly")
