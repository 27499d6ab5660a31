"""Makes one vector of a prompt's states, which come in chunks (vLLM V1's poolers)."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch.nn import functional as F

from pdserve_common.types.pooling_params import PoolingParams
from pdserve_engine.models.config import Activation, PoolerConfig
from pdserve_engine.sampling.logits_rows import Rows


class PoolingMetadata(NamedTuple):
    """One step's chunks, in the order of their states; the arrays are int64 [num_chunks]."""

    # The rows of the batch.
    rows: Rows
    # The first of a chunk's states, and how many there are.
    starts: Rows
    query_lens: Rows
    # Tokens of the request up to the chunk's end, and in all.
    seq_lens: Rows
    prompt_lens: Rows

    @property
    def complete(self) -> Rows:
        """The chunks that end their prompt, int64 [n], ascending."""
        return np.flatnonzero(self.seq_lens == self.prompt_lens)


class SequencePooling(Protocol):
    """Of a prompt's states, those that count."""

    def pool(self, states: torch.Tensor, metadata: PoolingMetadata) -> torch.Tensor:
        """Take a step's states [num_tokens, hidden_size]; return one row for each chunk of
        `metadata.complete`, in the states' dtype or fp32.
        """
        ...


class LastPooling:
    """The last token's state."""

    def pool(self, states: torch.Tensor, metadata: PoolingMetadata) -> torch.Tensor:
        """See `SequencePooling`."""
        ends = (metadata.starts + metadata.query_lens)[metadata.complete]
        return states[torch.from_numpy(ends - 1).to(states.device)]


class MeanPooling:
    """The mean over all tokens. A prompt's chunks come in order, the first one from its first token
    on: nothing of it is read from the prefix cache.
    """

    def __init__(self, *, max_num_seqs: int, hidden_size: int, device: torch.device) -> None:
        # By row of the batch, of the chunks so far. In fp64, and token by token, so that the sum
        # does not depend on how a prompt is cut into chunks.
        self._sums = torch.zeros(max_num_seqs, hidden_size, dtype=torch.float64, device=device)

    def pool(self, states: torch.Tensor, metadata: PoolingMetadata) -> torch.Tensor:
        """See `SequencePooling`."""
        chunks = zip(
            metadata.rows.tolist(),
            metadata.starts.tolist(),
            metadata.query_lens.tolist(),
            metadata.seq_lens.tolist(),
            strict=True,
        )
        for row, start, length, seq_len in chunks:
            before = self._sums[row : row + 1]
            if length == seq_len:
                before = torch.zeros_like(before)
            chunk = states[start : start + length].double()
            self._sums[row] = torch.cat((before, chunk)).cumsum(0)[-1]
        complete = metadata.complete
        rows, lens = (
            torch.from_numpy(array[complete]).to(states.device)
            for array in (metadata.rows, metadata.prompt_lens)
        )
        return (self._sums[rows] / lens.unsqueeze(1)).float()


def make_pooling(
    config: PoolerConfig, *, max_num_seqs: int, hidden_size: int, device: torch.device
) -> SequencePooling:
    """Return what the model's pooling type says, for a batch of so many rows."""
    if config.pooling_type == "last":
        return LastPooling()
    return MeanPooling(max_num_seqs=max_num_seqs, hidden_size=hidden_size, device=device)


def finish(vector: torch.Tensor, config: PoolerConfig, params: PoolingParams) -> torch.Tensor:
    """Return the answer to a request: an embedding that is cut and scaled, or the labels' logits as
    probabilities. `vector` is [size]; the answer is fp32.
    """
    vector = vector.float()[: params.dimensions]
    use_activation = params.use_activation
    if use_activation is None:
        use_activation = config.use_activation
    return _ACTIVATIONS[config.activation](vector) if use_activation else vector


def _normalize(vector: torch.Tensor) -> torch.Tensor:
    return F.normalize(vector, dim=0)


def _softmax(vector: torch.Tensor) -> torch.Tensor:
    return vector.softmax(0)


def _identity(vector: torch.Tensor) -> torch.Tensor:
    return vector


_ACTIVATIONS: Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "normalize": _normalize,
    "softmax": _softmax,
    "sigmoid": torch.sigmoid,
    "identity": _identity,
}
