#!/usr/bin/env bash
# Every API with curl alone. Run `emberline serve`, then: bash examples/curl.sh
set -euo pipefail

url=${EMBERLINE_URL:-http://127.0.0.1:8686}
model=@cf/huggingfacetb/smollm2-135m-instruct
json=(-H "Content-Type: application/json" -H "Authorization: Bearer ${EMBERLINE_KEY:-none}")

echo "# What is served (OpenAI)"
curl -sS --fail-with-body "${json[@]}" "$url/v1/models"

echo; echo "# A chat completion (OpenAI)"
curl -sS --fail-with-body "${json[@]}" "$url/v1/chat/completions" \
  -d '{"model": "'"$model"'", "messages": [{"role": "user", "content": "Name three colours."}], "max_tokens": 24}'

echo; echo "# The same, streamed"
curl -sS --fail-with-body -N "${json[@]}" "$url/v1/chat/completions" \
  -d '{"model": "'"$model"'", "messages": [{"role": "user", "content": "Count to five."}], "max_tokens": 16,
       "stream": true, "stream_options": {"include_usage": true}}'

echo "# Messages (Anthropic)"
curl -sS --fail-with-body "${json[@]}" -H "anthropic-version: 2023-06-01" "$url/v1/messages" \
  -d '{"model": "'"$model"'", "max_tokens": 24, "messages": [{"role": "user", "content": "Say hello."}]}'

echo; echo "# Run a model (Workers AI); the account is any name you like"
curl -sS --fail-with-body "${json[@]}" "$url/client/v4/accounts/local/ai/run/$model" \
  -d '{"prompt": "The sea is", "max_tokens": 24}'
echo
