"""Which code runs a model: the one call that reads its config, and the one that loads it."""

import logging
from pathlib import Path
from typing import get_args

import torch

from pdserve_engine.combinations import Feature, check_combination
from pdserve_engine.config import Convert, KVCacheDtype, LoadQuantization, ModelImpl, Runner
from pdserve_engine.models.base import Model
from pdserve_engine.models.config import (
    LlamaConfig,
    ModelConfig,
    ModelError,
    NativeUnsupportedError,
    errors_of_fields,
    is_multimodal,
    read_facts,
    read_json,
    read_native_config,
)
from pdserve_engine.models.config_fields import ModelFields, read_fields
from pdserve_engine.models.features import features_of_facts, features_of_model
from pdserve_engine.models.llama import LlamaModel
from pdserve_engine.models.pooler_config import read_pooler_config
from pdserve_engine.models.stage import ALL_LAYERS, Stage
from pdserve_engine.models.weights.llama import MODEL_PREFIX
from pdserve_engine.models.weights.loader import (
    Checkpoint,
    Progress,
    large_tensors_mapped_apart,
    show_progress,
)
from pdserve_kernels.groups import Group

logger = logging.getLogger(__name__)


def read_model_config(
    model_dir: str | Path,
    *,
    dtype: str = "auto",
    max_model_len: int | None = None,
    model_impl: ModelImpl = "auto",
    quantization: LoadQuantization | None = None,
    kv_cache_dtype: KVCacheDtype = "auto",
    runner: Runner = "auto",
    convert: Convert = "auto",
    pooler_config: str | None = None,
) -> ModelConfig:
    """Read `config.json` and `generation_config.json`; raise ModelError for what we cannot run.

    dtype is "auto" (the checkpoint's), "bfloat16" or "float32"; max_model_len defaults to the
    model's own limit and may only lower it. "auto" runs a model natively (the result is a
    LlamaConfig) where that is possible, else on the transformers backend, which has no
    quantization, no KV in FP8 and no pooling. quantization is for checkpoints that have none.
    pooler_config is JSON, for a model that pools (`read_pooler_config`).
    """
    if model_impl not in get_args(ModelImpl):
        choices = ", ".join(get_args(ModelImpl))
        raise ModelError(f"model_impl is {model_impl}, supported are {choices}")
    folder = Path(model_dir)
    raw = read_json(folder / "config.json")
    with errors_of_fields():
        read_fields(ModelFields, raw)
    if is_multimodal(raw):
        # Takes seconds to import, and most models need none of it.
        from pdserve_engine.models.llava_config import read_llava_config

        multimodal = read_llava_config(
            folder,
            raw,
            max_model_len=max_model_len,
            model_impl=model_impl,
            dtype=dtype,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            runner=runner,
            convert=convert,
            pooler_config=pooler_config,
        )
        logger.info("%s runs natively, its vision tower is transformers'", multimodal.architecture)
        return multimodal
    facts = read_facts(
        folder, raw, dtype=dtype, quantization=quantization, kv_cache_dtype=kv_cache_dtype
    )
    facts["pooler"] = read_pooler_config(
        folder, raw, runner=runner, convert=convert, overrides=pooler_config
    )
    if model_impl != "transformers":
        try:
            native = read_native_config(raw, max_model_len, facts)
        except NativeUnsupportedError as error:
            if model_impl == "native":
                raise
            reason = str(error)
        else:
            check_combination(features_of_model(native), ModelError)
            logger.info("%s runs natively", native.architecture)
            return native
    else:
        reason = "model_impl is transformers"
    of_backend = {Feature.TRANSFORMERS: f"the transformers backend runs the model ({reason})"}
    check_combination(of_backend | features_of_facts(**facts), ModelError)
    # Takes seconds to import, and most models need none of it.
    from pdserve_engine.models.transformers_backend.config import read_transformers_config

    try:
        config = read_transformers_config(folder, raw, max_model_len, facts)
    except ModelError as error:
        raise ModelError(f"{error} (not run natively: {reason})") from error
    logger.info("%s runs on the transformers backend: %s", config.architecture, reason)
    return config


def load_model(
    model_dir: str | Path,
    config: ModelConfig,
    *,
    device: torch.device,
    progress: Progress | None = None,
    group: Group | None = None,
    stage: Stage = ALL_LAYERS,
) -> Model:
    """Load the weights onto `device`, of one rank if there is a group or a stage; raise ModelError
    when they do not fit the config.

    Without `progress` a bar is drawn where stderr is a terminal, lines are logged elsewhere; of
    ranks the first does.
    """
    if progress is None and (group is None or group.rank == 0) and stage.is_first:
        progress = show_progress()
    if config.vision is not None:
        assert isinstance(config, LlamaConfig), "read_llava_config has made it"
        from pdserve_engine.models.llava import LlavaModel  # imports transformers, as above

        with large_tensors_mapped_apart():
            return LlavaModel(config, Path(model_dir), device, progress)
    # Those without a head may have been saved so.
    prefix = "" if config.pooler is None else MODEL_PREFIX
    checkpoint = Checkpoint(model_dir, progress=progress, prefix=prefix)
    with large_tensors_mapped_apart():
        if isinstance(config, LlamaConfig):
            return LlamaModel(config, checkpoint, device, group, stage)
        # Takes seconds to import, and most models need none of it.
        from pdserve_engine.models.transformers_backend.model import TransformersModel

        return TransformersModel(config, checkpoint, device)
