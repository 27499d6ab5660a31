"""What the requests of a batch ask for, on the device."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pdserve_kernels.sampling_batch import SamplingBatch
from pdserve_kernels.triton.staging import Field, Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSamplingBatch:
    """All columns are [n]. Kernels read them when they run, so a captured graph draws for whatever
    was copied there last.
    """

    top_p: torch.Tensor  # float64; 1 is no limit
    seeds: torch.Tensor  # int64
    positions: torch.Tensor  # int64
    divisors: torch.Tensor  # float32; 0 is greedy
    log_min_p: torch.Tensor  # float32; -inf is no limit
    top_k: torch.Tensor  # int32; 0, or the vocabulary's size and above, is no limit

    @classmethod
    def stage(cls, batch: SamplingBatch, device: torch.device) -> "DeviceSamplingBatch":
        """Return the batch on a device, without waiting for it."""
        layout = Layout(sampling_fields(len(batch.temperature)))
        return cls.of(layout.to_device(sampling_columns(batch), device))

    @classmethod
    def of(cls, views: Mapping[str, torch.Tensor]) -> "DeviceSamplingBatch":
        """Return the batch of a layout that has `sampling_fields`, columns [n] in the dtypes named
        there.
        """
        return cls(**{name: views[name] for name in sampling_fields(0)})


def sampling_fields(num_rows: int) -> dict[str, Field]:
    """Return the columns of a batch of num_rows as fields of a layout."""
    types = {
        "top_p": np.float64,
        "seeds": np.int64,
        "positions": np.int64,
        "divisors": np.float32,
        "log_min_p": np.float32,
        "top_k": np.int32,
    }
    return {name: Field(dtype, (num_rows,)) for name, dtype in types.items()}


def sampling_columns(batch: SamplingBatch) -> dict[str, npt.NDArray[np.generic]]:
    """Return a batch's columns [n] by their names, to be stored in the dtypes of `sampling_fields`;
    greedy rows have no filter.
    """
    is_random = batch.temperature != 0.0
    return {
        "top_p": np.where(is_random, batch.top_p, 1.0),
        "seeds": batch.seeds,
        "positions": batch.positions,
        "divisors": np.where(is_random, batch.divisors(), 0.0),
        "log_min_p": np.where(is_random, batch.log_min_p(), -np.inf),
        "top_k": np.where(is_random, np.clip(batch.top_k, 0, 2**31 - 1), 0),
    }


def has_filter(batch: SamplingBatch, vocab_size: int) -> bool:
    """Return whether any row is drawn from less than its whole vocabulary."""
    has_top_k = (batch.top_k > 0) & (batch.top_k < vocab_size)
    is_filtered = has_top_k | (batch.top_p < 1.0) | (batch.min_p > 0.0)
    return bool((is_filtered & (batch.temperature != 0.0)).any())
