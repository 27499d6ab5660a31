"""Which runner a model has."""

from pdserve_engine.models.base import Model
from pdserve_engine.models.llama import LlamaModel
from pdserve_engine.runner.model_runner import ModelRunner
from pdserve_engine.runner.pooling_runner import PoolingRunner
from pdserve_engine.runner.sharded_model import ShardedModel
from pdserve_engine.runner.sharded_runner import FollowerRunner, LeaderRunner, StageRunner


def runner_class(model: Model) -> type[ModelRunner]:
    """Return the class."""
    return cuda_runner_class(model) if model.device.type == "cuda" else _cpu_runner_class(model)


def _cpu_runner_class(model: Model) -> type[ModelRunner]:
    if model.config.pooler is not None:
        return PoolingRunner
    if isinstance(model, ShardedModel):
        return LeaderRunner
    if isinstance(model, LlamaModel):
        if not model.stage.is_last:
            return StageRunner
        if model.group is not None:
            return FollowerRunner
    return ModelRunner


def cuda_runner_class(model: Model) -> type[ModelRunner]:
    """Return the class of a model on CUDA. Needs Triton."""
    from pdserve_engine.runner.cuda_pooling_runner import CudaPoolingRunner
    from pdserve_engine.runner.cuda_runner import CudaModelRunner
    from pdserve_engine.runner.cuda_sharded_runner import CudaFollowerRunner, CudaLeaderRunner

    if model.config.pooler is not None:
        return CudaPoolingRunner
    if isinstance(model, ShardedModel):
        return CudaLeaderRunner
    if isinstance(model, LlamaModel) and model.group is not None:
        return CudaFollowerRunner
    return CudaModelRunner
