"""What a model that sees pictures asks of a request's."""

from typing import TYPE_CHECKING

from pdserve_common.errors import InvalidRequestError, PdserveError
from pdserve_common.types.tensors import TensorNotHeldError
from pdserve_engine.request.request import Request

if TYPE_CHECKING:
    from pdserve_engine.models.config import VisionConfig

TENSOR_NOT_HELD = "a picture's pixels are not on this worker"


def refuse_pictures(request: Request, vision: "VisionConfig | None") -> PdserveError | None:
    """Return InvalidRequestError unless its pictures are of the model's size and stand where its
    tokens for them are; TensorNotHeldError if it computes them here and pixels are missing.
    """
    if not request.mm_features:
        return None
    if vision is None:
        return _refusal("mm_features is set, the model takes text")
    shape = (vision.image_size, vision.image_size, 3)
    token_ids = request.core_request.prompt_token_ids
    for index, feature in enumerate(request.mm_features):
        field = f"mm_features[{index}]"
        data = feature.data
        if data is None or data.shape != shape:
            found = "missing" if data is None else list(data.shape)
            return _refusal(f"{field}.data.shape is {found}, must be {list(shape)}")
        if feature.length != vision.num_image_tokens:
            return _refusal(
                f"{field}.length is {feature.length}, must be {vision.num_image_tokens}"
            )
        stands = token_ids[feature.position : feature.position + feature.length]
        if stands != (vision.image_token_id,) * feature.length:
            return _refusal(
                f"{field} has other tokens in its place than {vision.image_token_id}, which stands "
                "for a picture"
            )
        pixels = request.tensors.get(data.content_hash)
        if pixels is None and not request.do_remote_prefill:
            return TensorNotHeldError(f"{field}: {TENSOR_NOT_HELD}")
        if pixels is not None and len(pixels) != shape[0] * shape[1] * shape[2]:
            return _refusal(f"{field}.data has {len(pixels)} bytes, its shape is {list(shape)}")
    return None


def _refusal(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, field="mm_features")
