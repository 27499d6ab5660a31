"""The pictures of a request: counted, placed among its tokens, and made pixels."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve_common.errors import InvalidRequestError
from pdserve_common.types.engine import MultiModalFeatureSpec
from pdserve_common.types.engine_client import Tensors
from pdserve_router.requests.input.generation_request import GenerationRequest
from pdserve_router.requests.input.request_limits import MAX_PICTURES
from pdserve_router.text.messages import ChatMessage
from pdserve_router.text.parts import Picture
from pdserve_router.text.picture_processor import PictureProcessor
from pdserve_router.workers.model_limits import ModelLimits

MODALITY = "image"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPictures:
    """What an engine takes of them, and the bytes that it names."""

    mm_features: tuple[MultiModalFeatureSpec, ...] = ()
    tensors: Tensors = field(default_factory=dict)


class RequestPictures:
    """Pictures on their way from a conversation to an engine's request."""

    def __init__(
        self,
        processor: PictureProcessor | None = None,
        *,
        max_images_per_prompt: int = MAX_PICTURES,
    ) -> None:
        """None: the model takes only text."""
        self._processor = processor
        self._max = max_images_per_prompt

    def check(self, pictures: Sequence[Picture]) -> None:
        """Raise InvalidRequestError, which names the field of the first one that is not taken."""
        if not pictures:
            return
        if self._processor is None:
            raise _not_taken(pictures)
        if len(pictures) > self._max:
            raise InvalidRequestError(
                f"the request has {len(pictures)} pictures, at most {self._max} "
                "(max_images_per_prompt)",
                field=pictures[self._max].field,
            )

    def check_request(self, request: GenerationRequest, limits: ModelLimits) -> bool:
        """Return whether it has pictures. Raises InvalidRequestError for what does not go with
        them, workers that look at none among it.
        """
        if not (pictures := pictures_of(request.messages)):
            return False
        if self._processor is None or MODALITY not in limits.capabilities.modalities:
            raise _not_taken(pictures)
        if request.truncate_prompt_tokens is not None:
            field = "truncate_prompt_tokens"
            raise InvalidRequestError(
                f"{field} is set with pictures: leave it unset, a part of a picture is none",
                field=field,
            )
        return True

    def expand(self, token_ids: Sequence[int], num_pictures: int, *, field: str) -> Sequence[int]:
        """Return the tokens with as many for each picture as the model wants. `token_ids` have one
        for each, and text may not have more of them: InvalidRequestError, which names `field`.
        """
        if self._processor is None:
            return token_ids
        image_token_id = self._processor.image_token_id
        num_found = token_ids.count(image_token_id)
        if num_found != num_pictures:
            raise InvalidRequestError(
                f"{field} has {num_found} tokens that stand for pictures ({image_token_id}) and "
                f"{num_pictures} pictures: text must not have such tokens",
                field=field,
            )
        if not num_pictures:
            return token_ids
        expanded: list[int] = []
        for token_id in token_ids:
            is_picture = token_id == image_token_id
            expanded += [token_id] * (self._processor.num_tokens if is_picture else 1)
        return expanded

    def place(self, request: GenerationRequest, token_ids: Sequence[int]) -> PlacedPictures:
        """Decode what stands in expanded tokens. Raises InvalidRequestError, which names the
        picture's field.
        """
        pictures = pictures_of(request.messages)
        if self._processor is None or not pictures:
            return PlacedPictures()
        length = self._processor.num_tokens
        positions = [
            position
            for position, token_id in enumerate(token_ids)
            if token_id == self._processor.image_token_id
        ][::length]
        features, tensors = [], {}
        for position, picture in zip(positions, pictures, strict=True):
            ref, pixels = self._processor.process(picture)
            tensors[ref.content_hash] = pixels
            features.append(
                MultiModalFeatureSpec(
                    modality=MODALITY,
                    identifier=ref.content_hash.hex(),
                    position=position,
                    length=length,
                    data=ref,
                )
            )
        return PlacedPictures(mm_features=tuple(features), tensors=tensors)


def pictures_of(messages: Sequence[ChatMessage] | None) -> Sequence[Picture]:
    """Return those of a conversation, in its order."""
    shown = [message.pictures for message in messages or () if message.has_pictures]
    return list(itertools.chain.from_iterable(shown))


def _not_taken(pictures: Sequence[Picture]) -> InvalidRequestError:
    """Return the refusal of a model that knows only text."""
    path = pictures[0].field
    return InvalidRequestError(f"{path} is a picture, the model takes only text", field=path)
