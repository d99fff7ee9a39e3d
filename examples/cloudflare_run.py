"""Workers AI's own API through Cloudflare's client. Run `emberline serve`, then: python examples/cloudflare_run.py"""

import os

from cloudflare import Cloudflare

client = Cloudflare(
    base_url=os.environ.get("EMBERLINE_URL", "http://127.0.0.1:8686") + "/client/v4",
    api_token=os.environ.get("EMBERLINE_KEY", "none"),
)

answer = client.ai.run(
    "@cf/huggingfacetb/smollm2-135m-instruct",
    account_id="local",  # on your own machine an account is any name you like
    messages=[{"role": "user", "content": "Name a river in Europe."}],
    max_tokens=32,
)
print(answer)
