"""Serve a checkpoint in a process of its own, and ask it as any client of OpenAI's API does.

python examples/serve_and_ask.py [CHECKPOINT]
"""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

checkpoint = sys.argv[1] if len(sys.argv) > 1 else "recipes/tiny-python"
with socket.create_server(("127.0.0.1", 0)) as free:
    port = str(free.getsockname()[1])
url = f"http://127.0.0.1:{port}"


def ask(path: str, body: dict | None = None) -> dict:
    """GET a path of the server, or POST a body to it."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


server = subprocess.Popen([sys.executable, "-m", "ptq", "serve", checkpoint, "--port", port])
try:
    while True:  # until the model is loaded
        try:
            model = ask("/v1/models")["data"][0]["id"]
            break
        except urllib.error.URLError:
            if server.poll() is not None:
                sys.exit("the server ended before it answered")
            time.sleep(0.2)
    body = {"model": model, "prompt": "def add(a, b):", "max_tokens": 16, "logprobs": 1}
    answer = ask("/v1/completions", body)
    print(answer["choices"][0]["text"])
    print(answer["usage"])
finally:
    server.terminate()
    server.wait()
