"""The draft model that a config names."""

import torch

from pdserve_common.tokens.tokenizer_digest import tokenizer_digest
from pdserve_engine.config import EngineConfig
from pdserve_engine.kv.kv_cache import KVCacheSpec
from pdserve_engine.models.base import Model
from pdserve_engine.models.config import ModelConfig, ModelError
from pdserve_engine.models.registry import load_model, read_model_config


class DraftModelSource:
    """A draft model: its shape, and its weights, now and after a sleep.

    Nobody is told of it, and none of its bytes are sent. If its folder changes, that costs accepted
    drafts at most.
    """

    def __init__(
        self, model_dir: str, config: EngineConfig, target: ModelConfig, device: torch.device
    ) -> None:
        """`target` is the model that the drafts are for. Raises ModelError."""
        self._model_dir = model_dir
        self._device = device
        self.config = read_model_config(
            model_dir, dtype=config.dtype, model_impl="native", runner="generate"
        )
        _check_windows(self.config)
        _check_vocabulary(self.config, target)
        if tokenizer_digest(model_dir) != tokenizer_digest(config.model):
            raise ModelError(
                f"draft_model is {model_dir}: its tokenizer.json is not that of the model "
                f"{config.model}, and must be"
            )
        # One group, as the model's, whose block ids it has.
        self.spec = KVCacheSpec.from_model(self.config, block_size=config.block_size, device=device)

    def load(self) -> Model:
        return load_model(self._model_dir, self.config, device=self._device)


def _check_windows(draft: ModelConfig) -> None:
    windows = [window for window in draft.attention_windows if window is not None]
    if windows:
        raise ModelError(
            f"draft_model has sliding windows ({windows[0]} tokens), and must have none"
        )


def _check_vocabulary(draft: ModelConfig, target: ModelConfig) -> None:
    if draft.vocab_size != target.vocab_size:
        raise ModelError(
            f"draft_model has a vocab_size of {draft.vocab_size}, must be the model's "
            f"{target.vocab_size}"
        )
    if draft.max_model_len < target.max_model_len:
        raise ModelError(
            f"draft_model has {draft.max_model_len} positions, must have at least max_model_len "
            f"({target.max_model_len}): lower --max-model-len"
        )
