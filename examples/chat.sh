#!/bin/sh
# A chat answer as server-sent events, with curl. -N shows each event when it comes.
set -eu
url=${PDSERVE_URL:-http://127.0.0.1:8000}
curl -sSN --fail-with-body "$url/v1/chat/completions" \
    -H "Content-Type: application/json" \
    -H "Authorization: Bearer ${PDSERVE_API_KEY:-none}" \
    -d '{
        "model": "'"${PDSERVE_MODEL:-pdserve-tiny}"'",
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "stream": true
    }'
