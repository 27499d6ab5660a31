"""Names of blocks: two requests share exactly the blocks up to the first in which anything that
their KV depends on differs.
"""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve_common.tokens.block_hash import ROOT_HASH, has_same_prompt, hash_block
from pdserve_common.types.engine import MultiModalFeatureSpec, TensorRef
from pdserve_common.types.lora import LoRARequest
from pdserve_engine.kv.block_pool import BlockPool
from pdserve_engine.kv.kv_cache_manager import KVCacheManager
from pdserve_engine.request.request import Request
from support.requests import held_request

BLOCK_SIZE = 4
MAX_TOKENS = 18
# Names that begin alike, or look like what separates names.
NAMES = st.sampled_from(["a", "ab", "b", "1:a", "a1:b", "adapter"])
TOKENS = st.lists(st.integers(0, 1), max_size=MAX_TOKENS)
Fields = dict[str, Any]


def records(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Fields]:
    return st.fixed_dictionaries(fields)


# Only the digest says which one it is.
LORA = {"lora_name": NAMES, "lora_int_id": st.integers(1, 2), "digest": NAMES}
TENSOR = {
    "content_hash": st.sampled_from([b"1", b"12", b"\0"]),
    "dtype": st.sampled_from(["bfloat16", "float32"]),
    "shape": st.sampled_from([(18, 2), (18, 4)]),
}
FEATURE = {
    "modality": st.sampled_from(["image", "audio"]),
    "identifier": NAMES,
    "length": st.integers(1, 7),
    # Tokens between the feature before and this one.
    "gap": st.integers(0, 5),
}
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.lists(st.integers(0, 1), min_size=10, max_size=MAX_TOKENS),
    "output": st.just([]) | TOKENS,
    "salt": st.none() | NAMES,
    "lora": st.none() | records(**LORA),
    "features": st.lists(records(**FEATURE), max_size=4),
    "embeds": st.none() | records(**TENSOR),
    # Positions of the prompt. None: all of them, and no mask.
    "embedded": st.none() | st.sets(st.integers(0, MAX_TOKENS - 1)),
}


def change(draw: st.DrawFn, fields: Fields, name: str) -> Fields:
    """Change one thing in a request's field, or all of it."""
    value = fields[name]
    if not value or not draw(st.integers(0, 3)):
        return {**fields, name: draw(FIELDS[name])}
    if name in ("lora", "embeds"):
        strategies = LORA if name == "lora" else TENSOR
        return {**fields, name: change_record(draw, value, strategies)}
    if name == "salt":
        return {**fields, name: draw(NAMES)}
    if name == "embedded":
        return {**fields, name: value ^ {draw(st.integers(0, MAX_TOKENS - 1))}}
    index = draw(st.integers(0, len(value) - 1))
    old = value[index]
    new = change_record(draw, old, FEATURE) if name == "features" else 1 - old
    is_end = draw(st.booleans())
    return {**fields, name: [*value[:index], new, *([] if is_end else value[index + 1 :])]}


def change_record(
    draw: st.DrawFn, record: Fields, strategies: dict[str, st.SearchStrategy[Any]]
) -> Fields:
    key = draw(st.sampled_from(sorted(strategies)))
    return {**record, key: draw(strategies[key])}


def place(features: Sequence[Fields]) -> tuple[MultiModalFeatureSpec, ...]:
    """Put features behind one another."""
    placed, end = [], 0
    for feature in features:
        position = end + feature["gap"]
        end = position + feature["length"]
        fields = {name: value for name, value in feature.items() if name != "gap"}
        placed.append(MultiModalFeatureSpec(position=position, **fields))
    return tuple(placed)


def make_request(request_id: str, fields: Fields) -> Request:
    prompt, embeds, embedded = fields["prompt"], fields["embeds"], fields["embedded"]
    has_mask = embeds is not None and embedded is not None
    return held_request(
        request_id,
        prompt,
        resume_output_token_ids=tuple(fields["output"]),
        cache_salt=fields["salt"],
        lora_request=None if fields["lora"] is None else LoRARequest(**fields["lora"]),
        mm_features=place(fields["features"]),
        prompt_embeds=None if embeds is None else TensorRef(**embeds),
        prompt_is_token_ids=tuple(i not in embedded for i in range(len(prompt)) if has_mask),
    )


def content_at(request: Request, position: int) -> tuple[object, ...]:
    """What stands there."""
    core = request.core_request
    features = [
        (each.modality, each.identifier, each.length, position - each.position)
        for each in core.mm_features
        if each.position <= position < each.position + each.length
    ]
    mask = core.prompt_is_token_ids
    is_prompt = position < request.num_prompt_tokens
    is_embedded = is_prompt and not (mask and mask[position])
    embeds = core.prompt_embeds if is_embedded else None
    return request.all_token_ids[position], features, embeds


def num_shared_blocks(first: Request, second: Request) -> int:
    """Count full blocks before anything differs, by the requests' content alone."""
    one, other = first.core_request, second.core_request
    if (one.cache_salt, first.adapter) != (other.cache_salt, second.adapter):
        return 0
    num_equal = 0
    for position in range(min(first.num_tokens, second.num_tokens)):
        if content_at(first, position) != content_at(second, position):
            break
        num_equal += 1
    return num_equal // BLOCK_SIZE


@pytest.mark.parametrize("changed", FIELDS)
@settings(max_examples=200, deadline=None)
@given(data=st.data(), fields=records(**FIELDS))
def test_a_difference_separates_blocks_from_where_it_stands(
    changed: str, data: st.DataObject, fields: Fields
) -> None:
    first = make_request("a", fields)
    second = make_request("b", change(data.draw, fields, changed))
    manager = KVCacheManager(BlockPool(32, enable_caching=True), BLOCK_SIZE)
    assert manager.allocate_slots(first, first.num_tokens) is not None
    manager.cache_blocks(first, first.num_tokens)
    _, num_hit = manager.get_computed_blocks(second, second.num_tokens)
    num_shared = num_shared_blocks(first, second)
    assert num_hit == num_shared * BLOCK_SIZE
    tails = (set(request.block_hashes[num_shared:]) for request in (first, second))
    assert not set.intersection(*tails), "nothing joins again behind a difference"
    if has_same_prompt(first.core_request, second.core_request):
        assert num_shared >= first.num_prompt_tokens // BLOCK_SIZE


def test_keys_are_told_apart_by_where_they_end() -> None:
    names = [
        hash_block(ROOT_HASH, b"\1\0\0\0", keys)
        for keys in ([], [("a", "b")], [("ab",)], [("a", 1), ("b", 2)], [("a", "1b2")], [("a1:b",)])
    ]
    assert len(set(names)) == len(names)
