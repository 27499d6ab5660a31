"""A completion over gRPC with plain stubs, as `protoc` makes them for any language."""

import os

import grpc

from pdserve.v1 import inference_service_pb2 as pb2
from pdserve.v1 import inference_service_pb2_grpc as pb2_grpc

request = pb2.GenerateRequest(text="Once upon a time")
request.sampling_params.max_tokens = 32
key = os.environ.get("PDSERVE_API_KEY")
metadata = [("authorization", f"Bearer {key}")] if key else []
with grpc.insecure_channel(os.environ.get("PDSERVE_ADDRESS", "127.0.0.1:50051")) as channel:
    stub = pb2_grpc.InferenceServiceStub(channel)
    for response in stub.Generate(request, timeout=30, metadata=metadata):
        for completion in response.output.outputs:
            print(completion.text, end="", flush=True)
        if response.output.finished:
            print(f"\n({response.output.usage.num_output_tokens} tokens)")
