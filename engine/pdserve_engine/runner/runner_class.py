"""Which runner a model has."""

from pdserve_engine.models.base import Model
from pdserve_engine.models.llama import LlamaModel
from pdserve_engine.runner.model_runner import ModelRunner
from pdserve_engine.runner.sharded_model import ShardedModel
from pdserve_engine.runner.sharded_runner import FollowerRunner, LeaderRunner, StageRunner


def runner_class(model: Model) -> type[ModelRunner]:
    """Return the class; that of CUDA needs Triton."""
    if isinstance(model, ShardedModel):
        return LeaderRunner
    if isinstance(model, LlamaModel):
        if not model.stage.is_last:
            return StageRunner
        if model.group is not None:
            return FollowerRunner
    if model.device.type != "cuda":
        return ModelRunner
    from pdserve_engine.runner.cuda_runner import CudaModelRunner

    return CudaModelRunner
