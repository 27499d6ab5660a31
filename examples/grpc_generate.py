"""A completion over gRPC, shown as it comes, with pdserve's typed client.

When its router is lost the client goes on at another one: name all of them, separated by commas.
"""

import os

from pdserve_client.client import Client
from pdserve_common.types.sampling_params import SamplingParams

params = SamplingParams(temperature=0, max_tokens=64)
addresses = os.environ.get("PDSERVE_ADDRESS", "127.0.0.1:50051").split(",")
with Client(addresses, api_key=os.environ.get("PDSERVE_API_KEY")) as client:
    for output in client.generate("Once upon a time", params, timeout_s=30):
        print(output.outputs[0].text, end="", flush=True)
print()
