"""On PYTHONPATH of vLLM's pair: its NIXL workers would pin the main threads of both to one core."""

import os

os.sched_setaffinity = lambda pid, mask: None
