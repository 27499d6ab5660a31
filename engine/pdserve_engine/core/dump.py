"""What the scheduler had planned when the model failed, for the log: shapes, never prompts."""

import json
from typing import Any

from pdserve_common.types.engine import SchedulerStats
from pdserve_engine.request.sched_output import NewRequestData, SchedulerOutput


def dump_step(step: SchedulerOutput, stats: SchedulerStats) -> str:
    """Return a step and the load around it as one line of JSON."""
    cached = step.scheduled_cached_reqs
    diffs = zip(cached.request_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)
    content = {
        "num_scheduled_tokens": step.num_scheduled_tokens,
        "new": [_new_request(request) for request in step.scheduled_new_reqs],
        "cached": [
            {"request_id": request_id, "num_computed_tokens": num, "new_block_ids": block_ids}
            for request_id, num, block_ids in diffs
        ],
        "finished_req_ids": sorted(step.finished_req_ids),
        "preempted_req_ids": sorted(step.preempted_req_ids),
        "encoder_inputs": sorted(step.scheduled_encoder_inputs),
        "num_running_reqs": stats.num_running_reqs,
        "num_waiting_reqs": stats.num_waiting_reqs,
        "num_free_blocks": stats.num_free_blocks,
        "num_total_blocks": stats.num_total_blocks,
    }
    return json.dumps(content)


def _new_request(request: NewRequestData) -> dict[str, Any]:
    params = request.sampling_params
    return {
        "request_id": request.request_id,
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_tokens": len(request.all_token_ids),
        "num_computed_tokens": request.num_computed_tokens,
        "num_blocks": [len(ids) for ids in request.block_ids],
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "max_tokens": params.max_tokens,
        "logits_processors": params.logits_processors,
        "adapter": request.adapter,
    }
