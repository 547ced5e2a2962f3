"""R22: the official clients that are installed with the tests, with the default model.

The steps are those tests of tests/server that need only a client and a server. `make clients` runs more clients, each
in its own environment.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from quire.weights.hub import DEFAULT_MODEL
from tests.gauntlet.crowds import warm_up
from tests.gauntlet.figures import Figure, Gauntlet, Row, exactly
from tests.gauntlet.watch import left_over
from tests.server import test_anthropic_client as by_anthropic
from tests.server import test_ollama_client as by_ollama
from tests.server import test_openai_client as by_openai
from tests.server import test_responses_client as by_responses
from tests.server import test_tools_client as by_tools
from tests.server.rig import Server, serving

KEYS = f"""
keys:
  - {{name: app, key: {by_openai.NORMAL}}}
  - {{name: urgent, key: {by_openai.HIGH}, tier: high}}
  - {{name: keeper, key: {by_openai.ADMIN}, admin: true}}
  - {{name: trial, key: {by_openai.SLOW}, tier: low, requests_per_minute: 1}}
  - {{name: other, key: {by_anthropic.KEY}}}
"""
Step = Callable[..., None]
STEPS: dict[str, tuple[Step, ...]] = {
    "openai": (
        by_openai.test_a_question_is_answered,
        by_openai.test_a_stream_has_the_same_text,
        by_openai.test_async,
        by_openai.test_the_stream_helper,
        by_openai.test_with_streaming_response,
        by_openai.test_characters_spread_over_tokens,
        by_openai.test_token_ids_of_completions,
        by_openai.test_several_prompts_and_token_ids,
        by_openai.test_n_is_3,
        by_openai.test_logprobs,
        by_openai.test_logit_bias_forces_and_forbids,
        by_openai.test_models,
        by_openai.test_keys,
        by_openai.test_a_key_over_its_limit,
        by_openai.test_request_ids,
        by_openai.test_unknown_fields_are_ignored_and_named,
        by_openai.test_a_stream_closed_early_frees_its_blocks,
        by_openai.test_an_answer_is_cancelled_when_its_client_times_out,
        by_responses.test_an_answer,
        by_responses.test_a_stream_has_the_same_text,
        by_responses.test_a_conversation_continues_with_returned_items,
        by_responses.test_an_answer_by_schema,
        by_responses.test_a_call_its_result_and_the_answer,
        by_tools.test_a_required_call_and_its_result,
        by_tools.test_a_named_tool_choice_gives_one_call_of_that_tool,
        by_tools.test_streamed_parallel_calls_equal_those_of_the_whole_answer,
        by_tools.test_a_schema_that_cannot_be_enforced_is_refused_by_name,
        by_tools.test_an_answer_by_schema,
        by_tools.test_tools_with_an_answer_format_leave_the_choice,
    ),
    "anthropic": (
        by_anthropic.test_a_question_is_answered,
        by_anthropic.test_events_come_in_order,
        by_anthropic.test_a_conversation,
        by_anthropic.test_fields_of_quire,
        by_anthropic.test_keys,
        by_anthropic.test_a_bad_stream_is_refused_before_it_begins,
        by_tools.test_a_round_trip_with_anthropics_client,
        by_tools.test_count_tokens_includes_tools,
    ),
    "ollama": (
        by_ollama.test_a_chat_in_a_stream,
        by_ollama.test_generate,
        by_ollama.test_an_answer_by_a_schema,
        by_ollama.test_tools_and_their_results,
        by_ollama.test_a_bad_request_names_the_field,
    ),
}
CONNECT: dict[str, Callable[[Server], Any]] = {
    "openai": by_openai.connect,
    "anthropic": by_anthropic.connect,
    "ollama": by_ollama.connect,
}


def run(gauntlet: Gauntlet) -> Sequence[Figure]:
    gauntlet.folder.mkdir(parents=True, exist_ok=True)
    keys = gauntlet.folder / "keys.yaml"
    keys.write_text(KEYS)
    options = ("--served-model-name", DEFAULT_MODEL, "--api-keys-file", str(keys), "--num-blocks", "400")
    figures: list[Figure] = []
    with serving(gauntlet.model, *options, key=by_openai.ADMIN) as server:
        worker_pid = server.worker_pid
        base = warm_up(server)
        for package, steps in STEPS.items():
            chosen = steps[:: gauntlet.size(1, 5)]
            with CONNECT[package](server) as client:
                failed = [step.__name__ for step in chosen if not _passes(gauntlet, step, server, client)]
            figures.append(Figure(f"steps with {package} {version(package)}", len(chosen), at_least=1))
            figures.append(exactly(f"failed steps with {package}", len(failed)))
        num_steps = sum(figure.value for figure in figures[::2])
        return [
            Figure("steps with all clients", num_steps, at_least=gauntlet.size(40, 8)),
            *figures,
            exactly("restarts of the worker", int(server.worker_pid != worker_pid)),
            *left_over(server, base),
        ]


def _passes(gauntlet: Gauntlet, step: Step, server: Server, client: Any) -> bool:
    known = {"server": server, "client": client, "claude": client}
    given = {name: known[name] for name in inspect.signature(step).parameters}
    begin = time.monotonic()
    try:
        step(**given)
    except Exception as error:
        gauntlet.say(f"{step.__module__}.{step.__name__}: {type(error).__name__}: {str(error)[:500]}")
        return False
    if (seconds := time.monotonic() - begin) > 10:
        gauntlet.say(f"{step.__name__}: {seconds:.0f} s")
    return True


ROWS = (Row("R22", "The official clients of OpenAI, Anthropic and Ollama work", run, limit_s=420, is_quick=False),)
