"""Names of full KV blocks. A block's name stands for all that its KV depends on, up to its last
token: with equal names go equal KV.

Source of the design: vLLM V1's hash_block_tokens and generate_block_hash_extra_keys.
"""

import hashlib
import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import takewhile
from operator import attrgetter

from pdserve_common.types.engine import EngineCoreRequest, MultiModalFeatureSpec, TensorRef

# The parent of a prompt's first block. Fixed, so that a router can compute the same hashes.
ROOT_HASH = b"\0" * 32

# What KV depends on besides tokens: what that is, then its fields, always equally many.
ExtraKey = tuple[str | int | bytes, ...]

_TRUNCATED = struct.Struct("<Q24x")

# The fields of a request that its prompt's KV depends on.
_prompt_of = attrgetter(
    "prompt_token_ids",
    "cache_salt",
    "lora_request",
    "mm_features",
    "prompt_embeds",
    "prompt_is_token_ids",
)


def hash_block(parent: bytes, tokens: bytes, extra_keys: Iterable[ExtraKey] = ()) -> bytes:
    """Return the chained SHA-256 of a full block: its parent's hash, its tokens (four bytes each)
    and its extra keys.

    Only blocks with equally many tokens are told apart.
    """
    return hashlib.sha256(parent + tokens + b"".join(map(_encode_key, extra_keys))).digest()


def extend_block_hashes(
    hashes: list[bytes], request: EngineCoreRequest, token_ids: Sequence[int], block_size: int
) -> None:
    """Append to `hashes`, which are those of the first full blocks of the request's `token_ids`,
    those of the other full blocks.
    """
    first = len(hashes)
    num_blocks = len(token_ids) // block_size
    if num_blocks <= first:
        return
    # One array for all: it takes half the time of one a block.
    tokens = array("I", token_ids[first * block_size : num_blocks * block_size]).tobytes()
    size = len(tokens) // (num_blocks - first)
    is_text = not request.mm_features and request.prompt_embeds is None
    num_keyed = 1 if is_text else num_blocks
    parent = hashes[-1] if hashes else ROOT_HASH
    for index in range(first, num_blocks):
        start = (index - first) * size
        block = tokens[start : start + size]
        if index < num_keyed:
            position = index * block_size
            keys = block_extra_keys(request, position, position + block_size)
            parent = hash_block(parent, block, keys)
        else:
            parent = hashlib.sha256(parent + block).digest()
        hashes.append(parent)


def truncated_hashes(hashes: Iterable[bytes]) -> tuple[int, ...]:
    """Return the first 8 bytes of each as a number: what KV events call blocks. Who confuses two
    makes a wrong estimate, no wrong KV.
    """
    return tuple(number for (number,) in _TRUNCATED.iter_unpack(b"".join(hashes)))


def _encode_key(key: ExtraKey) -> bytes:
    values = (part if isinstance(part, bytes) else str(part).encode() for part in key)
    # The length says where it ends: it may hold any bytes.
    return b"".join(b"%d:%s" % (len(value), value) for value in values)


def block_extra_keys(request: EngineCoreRequest, start: int, end: int) -> list[ExtraKey]:
    """Return what stands in the block of the tokens from `start` to before `end`, by content. What
    holds for the whole request stands in its first block: the chain carries it on.
    """
    keys = _request_keys(request) if start == 0 else []
    if request.mm_features:
        keys += _feature_keys(request.mm_features, start, end)
    if request.prompt_embeds is not None:
        keys += _embeds_keys(request, request.prompt_embeds, start, end)
    return keys


def has_same_prompt(first: EngineCoreRequest, second: EngineCoreRequest) -> bool:
    """Are both prompts the same, with all that their KV depends on?"""
    return bool(_prompt_of(first) == _prompt_of(second))


def _request_keys(request: EngineCoreRequest) -> list[ExtraKey]:
    """The tenant's salt, and the adapter's digest: its name may stand for another one tomorrow."""
    keys: list[ExtraKey] = []
    if request.cache_salt is not None:
        keys.append(("salt", request.cache_salt))
    if request.lora_request is not None:
        keys.append(("adapter", request.lora_request.digest))
    return keys


def _feature_keys(
    features: Sequence[MultiModalFeatureSpec], start: int, end: int
) -> list[ExtraKey]:
    """Which features stand in the block, and which part of each. They do not overlap and are in the
    order of the prompt; an identifier names a content.
    """
    first = bisect_right(features, start, key=lambda feature: feature.position + feature.length)
    inside = takewhile(lambda feature: feature.position < end, features[first:])
    return [("feature", f.modality, f.identifier, f.length, start - f.position) for f in inside]


def _embeds_keys(
    request: EngineCoreRequest, embeds: TensorRef, start: int, end: int
) -> list[ExtraKey]:
    """Which positions of the block have a row of the tensor instead of a token; without a mask all
    of the prompt has. The tensor is named as a whole.
    """
    is_token_id = request.prompt_is_token_ids
    positions = range(start, min(end, len(request.prompt_token_ids)))
    rows = [at - start for at in positions if not (is_token_id and is_token_id[at])]
    if not rows:
        return []
    return [("embeds", embeds.content_hash, embeds.dtype, str(embeds.shape), str(rows))]
