"""A chat answer, shown as it comes, with OpenAI's Python SDK."""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("PDSERVE_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("PDSERVE_API_KEY", "none"),
)
stream = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "Tell me a story."}],
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    elif chunk.usage is not None:
        print(f"\n({chunk.usage.completion_tokens} tokens)")
