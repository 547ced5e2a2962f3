"""A server that records the requests of an agent and answers with fixed events, to regenerate golden bodies.

python -m tests.clients.record --into build/captures --name claude --tool Bash --arguments '{"command": "echo hello"}'

The first request that offers the tool is answered with a call of it, every other one with text.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TEXT = "The tool said hello."
Event = dict[str, Any]


class Recorder(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    folder = Path()
    prefix = ""
    tool: str | None = None
    arguments = "{}"
    namespace: str | None = None
    reasoning: str | None = None
    numbers = itertools.count(1)

    def handle_one(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        data = self.rfile.read(length)
        try:
            body = json.loads(data) if data else None
        except ValueError:
            body = repr(data[:2000])
        number = next(Recorder.numbers)
        row = {"method": self.command, "path": self.path, "headers": dict(self.headers), "body": body}
        target = self.folder / f"{self.prefix}-{number:02}.json"
        target.write_text(json.dumps(row, indent=1))
        print(number, self.command, self.path, len(data), flush=True)
        self.reply(body if isinstance(body, dict) else {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):  # GET, HEAD, POST and so on
            return self.handle_one
        raise AttributeError(name)

    def reply(self, body: Event) -> None:
        path = self.path.partition("?")[0]
        if path.endswith("/count_tokens"):
            self.send_json({"input_tokens": 1000})
        elif path.endswith("/models"):
            self.send_json({"object": "list", "data": [], "models": []})
        elif path.endswith("/messages"):
            self.send_events(message_events(body, self.called(body)), body)
        elif path.endswith("/responses"):
            self.send_events(response_events(body, self.called(body)), body)
        else:
            self.send_json({"error": {"type": "not_found_error", "message": "not here"}}, 404)

    def called(self, body: Event) -> str | None:
        """The tool to call, if it is offered and was not called yet."""
        offered = body.get("tools") or []
        tools = {tool.get("name") for one in offered for tool in (one, *one.get("tools", []))}
        is_done = '"tool_result"' in json.dumps(body) or "call_output" in json.dumps(body)
        return self.tool if self.tool in tools and not is_done else None

    def send_json(self, found: object, status: int = 200) -> None:
        data = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def send_events(self, events: Iterator[Event], body: Event) -> None:
        found = list(events)
        if not body.get("stream"):
            self.send_json(found[0].get("message") or found[-1].get("response"))
            return
        data = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in found).encode()
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *values: object) -> None:
        pass


def message_events(body: Event, tool: str | None) -> Iterator[Event]:
    """Events of Anthropic's protocol."""
    usage = {"input_tokens": 1000, "output_tokens": 8, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0}
    message: Event = {"id": "msg_1", "type": "message", "role": "assistant", "model": body.get("model"), "content": []}
    yield {"type": "message_start", "message": message | {"stop_reason": None, "stop_sequence": None, "usage": usage}}
    if tool is None:
        block: Event = {"type": "text", "text": ""}
        delta: Event = {"type": "text_delta", "text": TEXT}
    else:
        block = {"type": "tool_use", "id": "toolu_1", "name": tool, "input": {}}
        delta = {"type": "input_json_delta", "partial_json": Recorder.arguments}
    blocks = [(block, delta)]
    if Recorder.reasoning is not None:
        thought = {"type": "thinking", "thinking": "", "signature": ""}
        blocks.insert(0, (thought, {"type": "thinking_delta", "thinking": Recorder.reasoning}))
    for index, (block, delta) in enumerate(blocks):
        yield {"type": "content_block_start", "index": index, "content_block": block}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    reason = "end_turn" if tool is None else "tool_use"
    yield {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": None}, "usage": usage}
    yield {"type": "message_stop"}


def response_events(body: Event, tool: str | None) -> Iterator[Event]:
    """Events of OpenAI's Responses protocol."""
    response: Event = {
        "id": "resp_1",
        "object": "response",
        "status": "in_progress",
        "model": body.get("model"),
        "output": [],
    }
    yield {"type": "response.created", "sequence_number": 0, "response": response}
    item: Event
    if tool is None:
        content = [{"type": "output_text", "text": TEXT, "annotations": []}]
        item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": content}
        added = item | {"status": "in_progress", "content": []}
        delta = {"type": "response.output_text.delta", "content_index": 0, "delta": TEXT}
    else:
        item = {"id": "fc_1", "type": "function_call", "call_id": "call_1", "name": tool, "status": "completed"}
        item |= {"arguments": Recorder.arguments} | ({"namespace": Recorder.namespace} if Recorder.namespace else {})
        added = item | {"status": "in_progress", "arguments": ""}
        delta = {"type": "response.function_call_arguments.delta", "delta": Recorder.arguments}
    if Recorder.reasoning is not None:
        content = [{"type": "reasoning_text", "text": Recorder.reasoning}]
        thought: Event = {"id": "rs_1", "type": "reasoning", "summary": [], "content": content}
        yield {"type": "response.output_item.added", "sequence_number": 1, "output_index": 0, "item": thought}
        yield {"type": "response.output_item.done", "sequence_number": 1, "output_index": 0, "item": thought}
    yield {"type": "response.output_item.added", "sequence_number": 1, "output_index": 0, "item": added}
    yield delta | {"sequence_number": 2, "item_id": item["id"], "output_index": 0}
    yield {"type": "response.output_item.done", "sequence_number": 3, "output_index": 0, "item": item}
    usage: Event = {"input_tokens": 1000, "output_tokens": 8, "total_tokens": 1008}
    usage |= {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    done = response | {"status": "completed", "output": [item], "usage": usage}
    yield {"type": "response.completed", "sequence_number": 4, "response": done}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.clients.record", description=__doc__)
    parser.add_argument("--into", type=Path, default=Path("build/captures"))
    parser.add_argument("--name", default="agent")
    parser.add_argument("--port", type=int, default=8900)
    parser.add_argument("--tool")
    parser.add_argument("--arguments", default="{}")
    parser.add_argument("--namespace", help="of the tool, which Codex keeps apart from its name")
    parser.add_argument("--reasoning", help="a text that is sent as reasoning before the answer")
    options = parser.parse_args()
    options.into.mkdir(parents=True, exist_ok=True)
    Recorder.folder, Recorder.prefix = options.into, options.name
    Recorder.tool, Recorder.arguments = options.tool, options.arguments
    Recorder.namespace, Recorder.reasoning = options.namespace, options.reasoning
    print(f"recording at http://127.0.0.1:{options.port}", flush=True)
    ThreadingHTTPServer(("127.0.0.1", options.port), Recorder).serve_forever()


if __name__ == "__main__":
    main()
