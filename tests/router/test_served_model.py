"""Workers of another model than the router's answer as well, with text that means nothing."""

import pytest

from pdserve_common.tokens.tokenizer_digest import tokenizer_digest
from pdserve_router.workers.worker import WorkerState
from support.waiting import until


@pytest.mark.parametrize(
    ("info", "reason"),
    [
        ({"model": "other"}, "it serves the model 'other', this router 'tiny'"),
        ({"tokenizer_digest": "0" * 64}, f"SHA-256 {'0' * 16}, here "),
    ],
    ids=["name", "tokenizer"],
)
async def test_a_worker_of_another_model_is_not_used(start_stack, caplog, info, reason) -> None:
    async with start_stack(prefill=0, info=info, wait=False) as stack:
        (client,) = stack.server.pool.decode
        await until(lambda: client.state is WorkerState.DOWN)
        assert not stack.server.router.is_ready
        # It may be replaced by the right one.
        await until(lambda: len(stack.decode.hellos) > 1)
        assert not client.is_ready
        assert reason in caplog.text


async def test_a_worker_with_the_same_tokenizer_is_used(start_stack, model_dir) -> None:
    digest = tokenizer_digest(model_dir)
    assert digest
    async with start_stack(prefill=0, info={"tokenizer_digest": digest}) as stack:
        assert stack.server.router.is_ready


def test_a_folder_without_a_tokenizer_has_no_digest(tmp_path) -> None:
    assert tokenizer_digest(tmp_path) == ""
