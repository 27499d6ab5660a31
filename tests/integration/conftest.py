"""Stacks that the suite's tests share, and how to start one of their own."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.stack import RunningStack, StartRouter, StartStack, attached_router, running_stack


@pytest.fixture(scope="session")
def start_stack(tmp_path_factory: pytest.TempPathFactory) -> StartStack:
    """`with start_stack(model=..., prefill=2) as stack`."""
    return lambda **options: running_stack(tmp_path_factory.mktemp("logs"), **options)


@pytest.fixture(scope="session")
def plain_stack(
    make_served_model: Callable[..., Path], start_stack: StartStack
) -> Iterator[RunningStack]:
    """One worker of each role, in fp32, for all tests that break nothing. Prompts come in chunks
    of 32 tokens.
    """
    model = make_served_model("LlamaForCausalLM", max_position_embeddings=8192)
    with start_stack(
        model=model, dtype="float32", num_threads=1, max_num_batched_tokens=32
    ) as stack:
        yield stack


@pytest.fixture(scope="session")
def bf16_stack(
    make_served_model: Callable[..., Path], start_stack: StartStack
) -> Iterator[RunningStack]:
    """One worker of each role, in bf16: a row has the same bits in any batch."""
    model = make_served_model("LlamaForCausalLM", max_position_embeddings=8192)
    with start_stack(model=model, dtype="bfloat16", num_threads=1) as stack:
        yield stack


@pytest.fixture
def stack(plain_stack: RunningStack) -> Iterator[RunningStack]:
    """`plain_stack`; each test leaves it idle."""
    yield plain_stack
    plain_stack.check_alive()
    plain_stack.assert_idle()


@pytest.fixture(scope="session")
def start_router() -> StartRouter:
    """`async with start_router(stack, decode=...) as routed`."""
    return attached_router
