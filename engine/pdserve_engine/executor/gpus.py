"""Which GPU a rank has."""

import os

import torch

VISIBLE = "CUDA_VISIBLE_DEVICES"


def check_gpus(num_ranks: int) -> None:
    """Raise ValueError, with the numbers, if this process sees fewer GPUs than there are ranks."""
    num_gpus = torch.cuda.device_count()
    if num_gpus < num_ranks:
        raise ValueError(
            f"tensor_parallel_size times pipeline_parallel_size is {num_ranks}, which takes as "
            f"many GPUs: torch sees {num_gpus} ({VISIBLE} is {os.environ.get(VISIBLE, 'unset')})"
        )


def use_gpu(rank: int) -> None:
    """Leave this process the GPU of this index among those it sees, for all of its threads: CUDA's
    current device is a thread's. Nothing may have used CUDA here before.
    """
    visible = os.environ.get(VISIBLE)
    os.environ[VISIBLE] = str(rank) if visible is None else visible.split(",")[rank].strip()
