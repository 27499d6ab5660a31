"""Choosing tokens in C++: the same tokens as the reference, in any batch and with any threads."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from pdserve_kernels.cpu.compiled import address, library
from pdserve_kernels.cpu.linear import (
    AnyLinearWeight,
    LinearWeight,
    kernel_arguments,
    linear,
    rows_for,
)
from pdserve_kernels.sampling_batch import Argmax, Sampled, SamplingBatch, check_mask

KERNEL_DTYPES = (torch.float32, torch.bfloat16)


def argmax(logits: torch.Tensor, *, mask: torch.Tensor | None = None) -> Argmax:
    """See the reference."""
    logits, mask = _readable(logits), _readable_mask(mask, logits.shape)
    best = _empty_argmax(len(logits))
    arguments = (*_describe(logits), address(mask))
    library().pds_argmax(*arguments, best.token_ids.data_ptr(), best.values.data_ptr())
    library().pds_count_nans(*arguments, best.num_nans.data_ptr())
    return best


def count_nans(logits: torch.Tensor) -> torch.Tensor:
    """See the reference."""
    logits = _readable(logits)
    counts = torch.empty(len(logits), dtype=torch.int64)
    library().pds_count_nans(*_describe(logits), None, counts.data_ptr())
    return counts


def sample(
    logits: torch.Tensor, batch: SamplingBatch, *, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """See the reference. Blocks of 64 tokens of which none is allowed are not looked at."""
    return sample_part(logits, batch, first_id=0, mask=mask).token_ids


def sample_part(
    logits: torch.Tensor,
    batch: SamplingBatch,
    *,
    first_id: int,
    mask: torch.Tensor | None = None,
) -> Sampled:
    """See the reference."""
    logits, mask = _readable(logits), _readable_mask(mask, logits.shape)
    arrays = (
        _column(batch.temperature, np.float32, len(logits)),
        _column(batch.divisors(), np.float32, len(logits)),
        _column(batch.top_k, np.int64, len(logits)),
        _column(batch.top_p, np.float64, len(logits)),
        _column(batch.log_min_p(), np.float32, len(logits)),
        _column(batch.seeds, np.int64, len(logits)),
        _column(batch.positions, np.int64, len(logits)),
    )
    token_ids, values = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits))
    pointers = (array.ctypes.data for array in arrays)
    library().pds_sample(
        *_describe(logits),
        address(mask),
        *pointers,
        first_id,
        token_ids.data_ptr(),
        values.data_ptr(),
    )
    return Sampled(token_ids, values)


def linear_argmax(
    x: torch.Tensor, packed: AnyLinearWeight, *, mask: torch.Tensor | None = None
) -> Argmax:
    """See the reference. The logits are never in memory; panels of which no row allows a token are
    not computed.
    """
    if not isinstance(packed, LinearWeight) or packed.num_parts != 1:
        return argmax(linear(x, packed), mask=mask)
    best = _empty_argmax(len(x))
    x, mask = rows_for(x, packed), _readable_mask(mask, (len(x), packed.out_features))
    outputs = (tensor.data_ptr() for tensor in best)
    library().pds_linear_argmax(*kernel_arguments(x, packed), address(mask), *outputs)
    return best


def _empty_argmax(num_rows: int) -> Argmax:
    token_ids, num_nans = torch.empty(2, num_rows, dtype=torch.int64)
    return Argmax(token_ids, num_nans, torch.empty(num_rows))


def _readable(logits: torch.Tensor) -> torch.Tensor:
    """Return logits as the kernels read them: fp32 or bf16, each row in one piece."""
    if logits.dim() != 2 or logits.shape[1] == 0 or logits.device.type != "cpu":
        raise ValueError(
            f"logits are {list(logits.shape)} on {logits.device}; "
            "they must be [n, vocab_size] on cpu, with a vocabulary"
        )
    if logits.dtype not in KERNEL_DTYPES:
        logits = logits.float()
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _readable_mask(mask: torch.Tensor | None, shape: Sequence[int]) -> torch.Tensor | None:
    """Return the mask of logits of this shape as the kernels read it, in one piece."""
    if mask is None:
        return None
    check_mask(mask, shape, torch.device("cpu"))
    return mask.contiguous()


def _describe(logits: torch.Tensor) -> tuple[int, ...]:
    is_bf16 = logits.dtype == torch.bfloat16
    return logits.data_ptr(), int(is_bf16), *logits.shape, logits.stride(0)


def _column(
    array: npt.NDArray[np.generic], dtype: type[np.generic], num_rows: int
) -> npt.NDArray[np.generic]:
    if array.shape != (num_rows,):
        raise ValueError(f"a column of the batch is {array.shape}; there are {num_rows} rows")
    return np.ascontiguousarray(array, dtype=dtype)
