// The checks of checks.py with the AI SDK. The argument names the provider.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, jsonSchema, Output, streamText, tool } from "ai";

const { QUIRE_URL, QUIRE_MODEL: model } = process.env;
const { question, long, weather, city_schema, capital_schema, no_model } = JSON.parse(process.env.QUIRE_WORDS);
const baseURL = `${QUIRE_URL}/v1`;
const providers = {
  "openai-compatible": () =>
    createOpenAICompatible({ name: "quire", baseURL, includeUsage: true, supportsStructuredOutputs: true }),
  openai: () => createOpenAI({ baseURL, apiKey: "none" }), // with /v1/responses
  anthropic: () => createAnthropic({ baseURL, apiKey: "none" }),
};
const oneCall = {
  quire: { parallel_tool_calls: false },
  openai: { parallelToolCalls: false },
  anthropic: { disableParallelToolUse: true },
};
const provider = providers[process.argv[2]]();

function expect(isTrue, what) {
  if (!isTrue) throw Error(`not as expected: ${JSON.stringify(what)}`);
}

function ask(prompt, more = {}) {
  return { model: provider(model), prompt, temperature: 0, maxOutputTokens: 64, maxRetries: 0, ...more };
}

const checks = {
  async chat() {
    const { text, finishReason } = await generateText(ask(question));
    expect(text.includes("Tokyo") && finishReason === "stop", [text, finishReason]);
    return text;
  },
  async stream() {
    let text = "", chunks = 0;
    const found = streamText(ask(question));
    for await (const piece of found.textStream) {
      text += piece;
      chunks += 1;
    }
    expect(chunks > 3 && text.includes("Tokyo"), [chunks, text]);
    expect((await found.usage).inputTokens > 0, await found.usage);
    return `${chunks} chunks`;
  },
  async tool() {
    const get_weather = tool({
      description: "The weather of a city.",
      inputSchema: jsonSchema(city_schema),
      execute: async ({ city }) => `sunny in ${city}`,
    });
    const { steps } = await generateText(
      ask(weather, { tools: { get_weather }, toolChoice: "required", providerOptions: oneCall }));
    const [call] = steps[0].toolCalls, [result] = steps[0].toolResults;
    expect(call.toolName === "get_weather" && typeof call.input.city === "string", call);
    expect(result.output === `sunny in ${call.input.city}`, result);
    const messages = [{ role: "user", content: weather }, ...steps[0].response.messages];
    const { text } = await generateText(ask(undefined, { messages }));
    expect(text.length > 0, text);
    return `get_weather(${call.input.city}), and an answer to its result`;
  },
  async schema() {
    const { output } = await generateText(
      ask(question, { output: Output.object({ schema: jsonSchema(capital_schema) }) }));
    expect(typeof output.capital === "string" && Number.isInteger(output.population), output);
    return JSON.stringify(output);
  },
  async error() {
    try {
      await generateText(ask(question, { model: provider(no_model) }));
    } catch (error) {
      expect(APICallError.isInstance(error) && error.statusCode === 404, String(error));
      expect(error.message.includes(no_model) && error.message.includes(model), error.message);
      return error.message;
    }
    throw Error("no error");
  },
  async usage() {
    const counts = [];
    for (const _ of [1, 2]) {
      const { usage } = await generateText(ask(long, { maxOutputTokens: 4 }));
      counts.push(usage.inputTokenDetails?.cacheReadTokens ?? usage.cachedInputTokens ?? 0);
    }
    expect(counts[1] >= 32 && counts[1] > counts[0], counts);
    return `${counts[0]}, then ${counts[1]} tokens cached`;
  },
};

for (const [check, run] of Object.entries(checks)) {
  let ok = true, detail;
  try {
    detail = String(await run());
  } catch (error) {
    console.error(error);
    [ok, detail] = [false, String(error)];
  }
  console.log(JSON.stringify({ check, ok, detail: detail.split(/\s+/).join(" ").slice(0, 200) }));
}
