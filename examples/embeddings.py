"""The sentence that is nearest to a question, by embeddings. Needs a server with the model:

emberline serve smollm2 minilm
"""

import os

from openai import OpenAI

URL = os.environ.get("EMBERLINE_URL", "http://127.0.0.1:8686")
SENTENCES = ["The cat sleeps on the sofa.", "Rates rose by half a percent.", "A new bakery opened downtown."]
QUESTION = "Where can I buy bread?"

client = OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("EMBERLINE_KEY", "none"))
reply = client.embeddings.create(model="minilm", input=[QUESTION, *SENTENCES])
question, *others = (item.embedding for item in reply.data)
for sentence, vector in zip(SENTENCES, others, strict=True):
    similarity = sum(a * b for a, b in zip(question, vector, strict=True))  # vectors have length one
    print(f"{similarity:.2f}  {sentence}")
