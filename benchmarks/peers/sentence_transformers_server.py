"""sentence-transformers under measurement, in an environment of its own.

python sentence_transformers_server.py MODEL TEXTS PORT: loads the model, serves POST / (a text in, its vector out, one
`encode` a request) and takes commands on standard input: `once` encodes every text by itself, `batched` all in batches
of 32, which it sorts by length; `vectors PATH` writes them as little-endian float32. A line of JSON answers each.
"""

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from sentence_transformers import SentenceTransformer

BATCH = 32


def main(path: str, texts_path: str, port: str) -> None:
    model = SentenceTransformer(path, device="cpu")
    with open(texts_path) as file:
        texts = json.load(file)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            text = json.loads(self.rfile.read(int(self.headers["content-length"])))["input"]
            body = json.dumps({"embedding": model.encode(text).tolist()}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", int(port)), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    model.encode(texts[:BATCH])
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        began_s, cpu_s = time.perf_counter(), time.process_time()
        if command == "once":
            for text in texts:
                model.encode(text)
        else:
            vectors = model.encode(texts, batch_size=BATCH)
            if command == "vectors":
                vectors.astype("<f4").tofile(argument)
        print(json.dumps({"s": time.perf_counter() - began_s, "cpu_s": time.process_time() - cpu_s}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
