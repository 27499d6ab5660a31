"""What is in the images, and what is not."""

import json

import pytest
from containers import TEST_PYTHON, VERSION, Docker

pytestmark = pytest.mark.images

ROUTER = f"pdserve-router:{VERSION}"
WORKER = f"pdserve-worker:{VERSION}-cpu"
# On top of the base.
MAX_MIB = {ROUTER: 300, WORKER: 1100}
RUN = ("run", "--rm", "--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--network=none")


@pytest.mark.parametrize("image", [ROUTER, WORKER])
def test_images_are_small_and_run_as_nobody(docker: Docker, image: str) -> None:
    size, base = (int(docker.inspect(name, ".Size")) for name in (image, TEST_PYTHON))
    print(f"\n{image}: {(size - base) >> 20} MiB on a base of {base >> 20} MiB")
    assert (size - base) >> 20 < MAX_MIB[image]
    config = json.loads(docker.inspect(image, "json .Config"))
    assert config["User"] == "10001:10001"
    assert config["StopSignal"] == "SIGTERM"
    assert config["Labels"]["org.opencontainers.image.version"] == VERSION
    assert (
        docker(
            *RUN, image, "sh", "-c", "for c in pip cc gcc g++ curl; do command -v $c; done; id -u"
        )
        == "10001"
    )


def test_routers_have_no_torch(docker: Docker) -> None:
    names = ("torch", "nixl_cu13", "triton", "xgrammar")
    find = f"import importlib.util as i; print([i.find_spec(n) for n in {names}])"
    assert docker(*RUN, ROUTER, "python", "-c", find) == "[None, None, None, None]"
    for command in ("pdserve-router", "pdserve", "hf"):
        docker(*RUN, ROUTER, command, "--help")


def test_workers_bring_compiled_kernels_for_every_instruction_set(docker: Docker) -> None:
    build = (
        "from pdserve_kernels.cpu.build import build, COMPILER_FLAGS; "
        "print(all(str(build(isa)).startswith('/opt/pdserve/') for isa in COMPILER_FLAGS))"
    )
    assert docker(*RUN, WORKER, "python", "-c", build) == "True"
    for command in ("pdserve-prefill", "pdserve-decode"):
        docker(*RUN, WORKER, command, "--help")
