"""The clients that `make clients` runs: packages, versions, scripts and checks."""

from __future__ import annotations

from dataclasses import dataclass

from tests.clients.scripts import checks

# For clients that require PyTorch: a CPU build, installed first, so that no CUDA build is installed.
TORCH = "torch==2.13.0"
CHAT_CHECKS = ("chat", "stream", "tool", "schema", "error", "usage")  # for clients that do not list models
AGENT_CHECKS = ("chat", "tool", "error")


@dataclass(frozen=True, slots=True)
class Client:
    name: str
    environment: str
    pins: tuple[str, ...]  # name==version for pip, name@version for npm; the first is the client itself
    script: str
    checks: tuple[str, ...] = checks.CHECKS
    arguments: tuple[str, ...] = ()
    wants_long_context: bool = False  # its prompts exceed the default model's 8192 tokens

    @property
    def is_node(self) -> bool:
        return "==" not in self.pins[0]

    @property
    def version(self) -> str:
        return self.pins[0].rpartition("@" if self.is_node else "==")[2]


LANGCHAIN = ("langchain-openai==1.7.3", "langchain-anthropic==1.7.7")
AI_SDK = {
    "openai-compatible": "@ai-sdk/openai-compatible@3.0.90",
    "openai": "@ai-sdk/openai@4.0.114",
    "anthropic": "@ai-sdk/anthropic@4.0.102",
}
INSTRUCTOR = ("instructor[anthropic]==1.17.0",)
INSPECT = ("inspect-ai==0.3.285", "openai==3.49.0", "anthropic==2.8.0")


def _ai_sdk(provider: str) -> Client:
    others = (pin for name, pin in AI_SDK.items() if name != provider)
    pins = (AI_SDK[provider], *others, "ai@7.0.169")
    return Client(f"ai, @ai-sdk/{provider} (npm)", "ai", pins, "by_ai.mjs", CHAT_CHECKS, (provider,))


# To add a client: write a script that runs its checks, and add a row.
CLIENTS = (
    Client("openai (npm)", "openai-npm", ("openai@7.53.0",), "openai_npm.mjs"),
    Client("langchain-openai", "langchain", LANGCHAIN, "by_langchain_openai.py"),
    Client("langchain-anthropic", "langchain", LANGCHAIN[::-1], "by_langchain_anthropic.py"),
    # LiteLLM imports mcp if a request has tools, but does not depend on it.
    Client("litellm", "litellm", ("litellm==1.106.2", "mcp==2.3.0"), "by_litellm.py"),
    Client("llm", "llm", ("llm==0.36",), "by_llm.py"),
    Client(
        "Claude Code (npm)",
        "claude",
        ("@anthropic-ai/claude-code@2.1.325",),
        "by_claude.py",
        AGENT_CHECKS,
        wants_long_context=True,
    ),
    Client("Codex (npm)", "codex", ("@openai/codex@0.166.0",), "by_codex.py", AGENT_CHECKS, wants_long_context=True),
    Client(
        "ollama", "ollama", ("ollama==0.6.3",), "by_ollama.py", ("models", "chat", "stream", "tool", "schema", "error")
    ),
    *map(_ai_sdk, AI_SDK),
    Client("instructor", "instructor", INSTRUCTOR, "by_instructor.py", ("tool", "schema", "stream", "error", "usage")),
    Client(
        "pydantic-ai", "pydantic-ai", ("pydantic-ai-slim[openai,anthropic]==2.66.0",), "by_pydantic_ai.py", CHAT_CHECKS
    ),
    Client("openai-agents", "openai-agents", ("openai-agents==0.24.0",), "by_openai_agents.py", CHAT_CHECKS),
    Client("lm-eval", "lm-eval", ("lm-eval[api]==0.4.13",), "by_lm_eval.py", ("loglikelihood", "generate")),
    Client("aider", "aider", ("aider-chat==0.86.2",), "by_aider.py", ("chat", "edit", "error")),
    Client("llama-index", "llama-index", ("llama-index-llms-openai-like==0.8.1",), "by_llama_index.py", CHAT_CHECKS),
    Client("smolagents", "smolagents", ("smolagents[openai]==1.26.0",), "by_smolagents.py", CHAT_CHECKS),
    Client("inspect-ai", "inspect-ai", INSPECT, "by_inspect_ai.py", ("chat", "tool", "schema", "error", "usage")),
    Client("dspy", "dspy", ("dspy==3.4.1",), "by_dspy.py", ("chat", "stream", "tool", "schema", "error", "usage")),
    Client(
        "outlines", "outlines", ("outlines[openai]==1.3.3",), "by_outlines.py", ("chat", "stream", "schema", "error")
    ),
    Client(
        "guidance",
        "guidance",
        ("guidance==0.3.1", "openai==2.54.0"),
        "by_guidance.py",
        ("chat", "schema", "grammar", "error"),
    ),
    Client("guidellm", "guidellm", ("guidellm==0.8.1", TORCH), "by_guidellm.py", ("chat", "completions", "responses")),
    Client("aiperf", "aiperf", ("aiperf==0.13.0",), "by_aiperf.py", ("chat", "completions", "responses", "messages")),
)
