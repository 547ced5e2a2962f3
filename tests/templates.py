"""Render requests of Claude Code and Codex with every chat template of a folder: `python -m tests.templates FOLDER`.

For templates that cannot be copied into this repository, such as a collection of *.jinja files. Prints the texts that
are missing from the prompts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from quire.errors import TemplateError
from quire.text.chat_template import ChatTemplate
from quire.text.messages import ChatRequest
from quire.text.tokenizer import Tokenizer
from tests.text.test_turns import GOLDEN, chat_of
from tests.text.vocabularies import byte_level_gguf


def missing(template: ChatTemplate, chat: ChatRequest) -> list[str]:
    """Message texts and tool names that the prompt contains neither as text nor as JSON."""
    rendered = template.render(chat)
    texts = [part.text.strip() for message in chat.messages for part in message.parts]
    return [
        text[:60]
        for text in (*texts, *(tool.name for tool in chat.tools))
        if text not in rendered and json.dumps(text, ensure_ascii=False)[1:-1] not in rendered
    ]


def main(folder: Path) -> int:
    tokenizer = Tokenizer.from_gguf(byte_level_gguf())
    chats = {path.stem: chat_of(json.loads(path.read_text())) for path in GOLDEN}
    paths = sorted(folder.glob("*.jinja"))
    num_bad = 0
    for path in paths:
        template = ChatTemplate(path.read_text(), tokenizer)
        problems: list[str] = []
        for name, chat in chats.items():
            try:
                if lost := missing(template, chat):
                    problems.append(f"{name}: missing {lost}")
            except TemplateError as error:
                problems.append(f"{name}: {error}")
        template.close()
        num_bad += bool(problems)
        print(f"{path.stem:60} {template.tool_format.name:8} {'; '.join(problems) or 'ok'}", flush=True)
    print(f"{len(paths) - num_bad} of {len(paths)} templates render all {len(chats)} conversations completely")
    return 0 if num_bad == 0 else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
