"""The OpenAPI document is valid and agrees with the route table, and `/docs` shows it without running any of it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
import schemathesis
from schemathesis.core.result import Ok

from quire.server.app import ENDPOINTS
from quire.server.routes import ERRORS, EXAMPLES, FIELDS, STATUSES, openapi_document
from quire.server.web import DOCS, DOCS_HEADERS


@pytest.fixture
def document() -> dict[str, Any]:
    return openapi_document(ENDPOINTS, "1.2.3", model="some/model")


def test_it_is_json_and_every_reference_resolves(document: dict[str, Any]) -> None:
    text = json.dumps(document, allow_nan=False)
    for ref in re.findall(r'"\$ref": "#/([^"]+)"', text):
        found: Any = document
        for step in ref.split("/"):
            found = found[step]


def test_routes_that_need_a_key_have_security(document: dict[str, Any]) -> None:
    paths = document["paths"]
    both: list[dict[str, list[str]]] = [{"bearer": []}, {"x-api-key": []}]
    assert paths["/health"]["get"]["security"] == []
    assert paths["/metrics"]["get"]["security"] == both
    assert paths["/v1/cache/clear"]["post"]["security"] == both
    assert "admin" in paths["/v1/cache/clear"]["post"]["description"]
    assert set(document["components"]["securitySchemes"]) == {"bearer", "x-api-key"}
    assert "401" not in paths["/health"]["get"]["responses"]


def test_errors_have_the_format_of_the_routes_protocol(document: dict[str, Any]) -> None:
    chat = document["paths"]["/v1/chat/completions"]["post"]["responses"]
    messages = document["paths"]["/v1/messages"]["post"]["responses"]
    every = {str(status) for status in STATUSES}
    assert set(messages) == {"200", *every}
    assert set(chat) == {"200", *every} - {"529"}
    for responses, name in ((chat, "OpenAIError"), (messages, "AnthropicError")):
        for status in set(responses) - {"200"}:
            schema = responses[status]["content"]["application/json"]["schema"]
            assert schema == {"$ref": f"#/components/schemas/{name}"}
    assert "retry-after" in chat["429"]["headers"]
    assert "retry-after" not in chat["400"]["headers"]


def test_health_has_its_own_body_with_503(document: dict[str, Any]) -> None:
    unwell = document["paths"]["/health"]["get"]["responses"]["503"]["content"]["application/json"]["schema"]
    assert {"$ref": "#/components/schemas/Health"} in unwell["anyOf"]


def test_streaming_routes_have_a_stream_type(document: dict[str, Any]) -> None:
    paths = document["paths"]
    chat = paths["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    assert set(chat) == {"application/json", "text/event-stream"}
    assert set(paths["/health"]["get"]["responses"]["200"]["content"]) == {"application/json"}
    assert "content" not in paths["/metrics"]["get"]["responses"]["200"]


def test_path_parameters_lose_their_converters(document: dict[str, Any]) -> None:
    (model,) = document["paths"]["/v1/models/{model}"]["get"]["parameters"]
    assert (model["name"], model["schema"]["type"], model["example"]) == ("model", "string", "some/model")
    ids = {operation["operationId"] for path in document["paths"].values() for operation in path.values()}
    assert len(ids) == len(ENDPOINTS)


def test_fields_are_described_unless_they_describe_themselves(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert schemas["TokenizeRequest"]["properties"]["tools"]["description"] == FIELDS["tools"]
    metadata = schemas["CreateBatchRequest"]["properties"]["metadata"]
    assert "description" not in metadata
    assert metadata["anyOf"][0]["description"] == "Returned with the batch."


def test_tables_name_existing_fields() -> None:
    assert all(text.endswith(".") for text in [*FIELDS.values(), *STATUSES.values()])
    assert set(ERRORS) == {"openai", "anthropic", "ollama"}
    json.dumps(dict(EXAMPLES))


def test_the_table_is_described(document: dict[str, Any]) -> None:
    schema = schemathesis.openapi.from_dict(document)
    schema.validate()
    operations = [one.ok() for one in schema.get_all_operations() if isinstance(one, Ok)]
    found = {(one.method.upper(), one.path) for one in operations}
    assert found == {(row.method, re.sub(r":\w+\}", "}", row.path)) for row in ENDPOINTS}
    for endpoint in ENDPOINTS:
        operation = document["paths"][re.sub(r":\w+\}", "}", endpoint.path)][endpoint.method.lower()]
        assert bool(operation["security"]) == (endpoint.access.name != "PUBLIC")
        if endpoint.body is not None:  # each has an example for the page
            example = operation["requestBody"]["content"]["application/json"]["example"]
            msgspec.convert(example, endpoint.body)


# The page


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def inline(tag: str) -> str:
    (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", DOCS, re.DOTALL)
    return str(text)


def test_the_page_is_self_contained() -> None:
    tags = Tags()
    tags.feed(DOCS)
    for tag, attributes in tags.tags:
        assert tag not in ("img", "iframe", "object", "embed", "base")
        assert "src" not in attributes
        assert "style" not in attributes  # the policy would refuse it
        assert not any(name.startswith("on") for name in attributes)
    assert "://" not in inline("script")  # no URL
    assert "url(" not in inline("style")
    assert "@import" not in inline("style")
    assert "prefers-color-scheme: dark" in inline("style")
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in tags.tags


def test_the_policy_names_the_script_and_the_style_by_digest() -> None:
    directives = dict(part.strip().split(" ", 1) for part in DOCS_HEADERS["content-security-policy"].split(";"))
    for tag in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(inline(tag).encode()).digest()).decode()
        assert directives[f"{tag}-src"] == f"'sha256-{digest}'"
    assert directives["default-src"] == "'none'"
    assert directives["connect-src"] == "'self'"
    assert "unsafe" not in DOCS_HEADERS["content-security-policy"]
    assert "*" not in DOCS_HEADERS["content-security-policy"]
    assert DOCS_HEADERS["content-security-policy"].isascii()
    assert DOCS_HEADERS["content-security-policy"].isprintable()


def test_the_page_neither_makes_markup_nor_keeps_keys() -> None:
    script = inline("script")
    unsafe = ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "new Function", "setTimeout(")
    storage = ("localStorage", "sessionStorage", "cookie", "indexedDB")
    assert not [word for word in (*unsafe, *storage) if word in script]


# The parts of a browser that the page uses. The tree is printed as (tag, attributes, children) or text.
BROWSER = """
const ids = {};
class Node {
  constructor(tag) {
    Object.assign(this, { tagName: tag.toUpperCase(), attributes: {}, children: [], listeners: {}, value: "" });
  }
  setAttribute(name, value) {
    if (typeof value !== "string") throw Error("attribute " + name);
    this.attributes[name] = value;
  }
  append(...children) { for (const one of children) this.children.push(one instanceof Node ? one : String(one)); }
  replaceChildren(...children) { this.children = []; this.append(...children); }
  addEventListener(name, call) { this.listeners[name] = call; }
  get textContent() { return this.children.map((one) => one instanceof Node ? one.textContent : one).join(""); }
  set textContent(text) { this.children = [String(text)]; }
  toJSON() { return [this.tagName, this.attributes, this.children]; }
}
for (const id of ["title", "about", "form", "key", "main"]) ids[id] = new Node("div");
globalThis.document = { createElement: (tag) => new Node(tag), getElementById: (id) => ids[id] || null };
globalThis.location = { href: "http://127.0.0.1:8000/under/docs", hash: "" };
globalThis.addEventListener = () => {};
const input = JSON.parse(require("fs").readFileSync(0, "utf8"));
const asked = [];
globalThis.fetch = async (url, options) => {
  asked.push([url, options.headers]);
  if (input.key && options.headers.Authorization !== "Bearer " + input.key) return { status: 401, ok: false };
  return { status: 200, ok: true, json: async () => input.document };
};
const settle = () => new Promise((done) => setImmediate(done));
(async () => {
  (0, eval)(input.script);
  await settle();
  const before = ids.about.textContent;
  if (input.key) {
    ids.key.value = input.key;
    ids.form.listeners.submit({ preventDefault() {} });
    await settle();
  }
  console.log(JSON.stringify({ before, asked, title: ids.title, about: ids.about, main: ids.main }));
})();
"""


def shown(document: dict[str, Any], tmp_path: Path, key: str = "") -> dict[str, Any]:
    (tmp_path / "browser.js").write_text(BROWSER)
    given = json.dumps({"script": inline("script"), "document": document, "key": key})
    outcome = subprocess.run(
        ["node", str(tmp_path / "browser.js")], input=given, capture_output=True, text=True, check=False
    )
    assert outcome.returncode == 0, outcome.stderr
    page: dict[str, Any] = json.loads(outcome.stdout)
    return page


def texts(node: Any) -> list[str]:
    return [node] if isinstance(node, str) else [text for child in node[2] for text in texts(child)]


def nodes(node: Any) -> list[Any]:
    return [] if isinstance(node, str) else [node, *(found for child in node[2] for found in nodes(child))]


needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="runs the page's script in Node.js")


@needs_node
def test_the_page_shows_every_route_field_and_a_command(document: dict[str, Any], tmp_path: Path) -> None:
    page = shown(document, tmp_path)
    words = texts(page["main"])
    assert page["asked"] == [["openapi.json", {}]]
    assert texts(page["title"]) == ["quire 1.2.3"]
    for row in ENDPOINTS:
        assert re.sub(r":\w+\}", "}", row.path) in words
        assert row.summary in words
    for name in ("messages", "temperature", "cache", FIELDS["tools"], "Returned with the batch.", "ChatMessage"):
        assert name in words
    commands = [one for one in words if one.startswith("curl ")]
    assert len(commands) == len(ENDPOINTS)
    assert any("http://127.0.0.1:8000/under/v1/models/some/model'" in one for one in commands)
    (health,) = [one for one in commands if one.endswith("/health'")]
    assert "Authorization" not in health
    assert not any("Authorization" in one for one in commands)  # this server asked for no key


@needs_node
def test_the_page_asks_for_a_key_and_uses_it(document: dict[str, Any], tmp_path: Path) -> None:
    page = shown(document, tmp_path, key="it's-a-key")
    assert "needs an API key" in page["before"]
    assert page["asked"][1] == ["openapi.json", {"Authorization": "Bearer it's-a-key"}]
    commands = [one for one in texts(page["main"]) if one.startswith("curl ")]
    assert any("-H 'Authorization: Bearer it'\\''s-a-key'" in one for one in commands)


@needs_node
def test_nothing_in_a_description_becomes_markup(document: dict[str, Any], tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=alert(1)>\"'`${7*7}javascript:alert(1)"
    operation = document["paths"].pop("/health")["get"]
    operation |= {"summary": evil, "description": evil, "tags": [evil]}
    operation["responses"]["200"]["description"] = evil
    document["paths"]["/" + evil] = {"get": operation}
    document["info"] |= {"title": evil, "description": evil}
    schemas = document["components"]["schemas"]
    schemas[evil] = {
        "description": evil,
        "properties": {evil: {"description": evil, "default": evil}},
    }
    schemas["ChatCompletionRequest"]["properties"][evil] = {"$ref": f"#/components/schemas/{evil}"}
    page = shown(document, tmp_path)
    everything = [one for part in ("title", "about", "main") for one in nodes(page[part])]
    assert not {one[0] for one in everything} & {"IMG", "SCRIPT", "STYLE", "IFRAME"}
    for tag, attributes, _ in everything:
        assert set(attributes) <= {"class", "href", "id", "type"}
        if tag == "A":
            assert re.fullmatch(r"#type-[\w.-]*", attributes["href"])
    assert evil in texts(page["main"])
