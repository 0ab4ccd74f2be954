"""Write tests/server/requests/haystack.json: what Haystack's own components send to a chat server.

Needs haystack-ai, in an environment of its own:

    python scripts/record_stack_requests.py
"""

import http.server
import json
import os
import threading
from pathlib import Path
from typing import Any

from haystack import Document, Pipeline
from haystack.components.builders import ChatPromptBuilder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.utils import Secret

OUT = Path(__file__).parents[1] / "tests" / "server" / "requests" / "haystack.json"
TEMPLATE = """
Given the following information, answer the question.

Context:
{% for document in documents %}
    {{ document.content }}
{% endfor %}

Question: {{question}}
Answer:
"""


def passages() -> list[str]:
    """Passages that the requests of all stacks paste."""
    table: dict[str, list[str]] = json.loads(OUT.with_name("passages.json").read_text("utf-8"))
    return table["passages"]


def main() -> None:
    """Ask twice, the second time with the passages in another order and another question."""
    os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"
    bodies: list[dict[str, Any]] = []

    class Recorder(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            size = int(self.headers["content-length"])
            bodies.append(json.loads(self.rfile.read(size)))
            message = {"role": "assistant", "content": "So."}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            body = {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
            answer = json.dumps(body | {"choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    pipeline = Pipeline()
    pipeline.add_component("prompt", ChatPromptBuilder([ChatMessage.from_user(TEMPLATE)]))
    url = f"http://127.0.0.1:{server.server_port}/v1"
    llm = OpenAIChatGenerator(model="m", api_key=Secret.from_token("any"), api_base_url=url)
    pipeline.add_component("llm", llm)
    pipeline.connect("prompt.prompt", "llm.messages")
    found = [Document(content=passage) for passage in passages()]
    for documents, question in ((found, "Who sleeps?"), (found[::-1], "Who flies high?")):
        pipeline.run({"prompt": {"documents": documents, "question": question}})
    server.shutdown()
    OUT.write_text(json.dumps(bodies, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
