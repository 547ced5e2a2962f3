// The checks of checks.py with OpenAI's client for Node.js.
import OpenAI from "openai";

const { QUIRE_URL, QUIRE_MODEL: model } = process.env;
const { question, long, weather, city_schema, capital_schema, no_model } = JSON.parse(process.env.QUIRE_WORDS);
const client = new OpenAI({ baseURL: `${QUIRE_URL}/v1`, apiKey: "none", maxRetries: 0 });
const tool = { name: "get_weather", description: "The weather of a city.", parameters: city_schema };

function expect(isTrue, what) {
  if (!isTrue) throw Error(`not as expected: ${JSON.stringify(what)}`);
}

function ask(content, more = {}) {
  return { model, messages: [{ role: "user", content }], temperature: 0, max_tokens: 64, ...more };
}

const checks = {
  async models() {
    const found = [];
    for await (const one of client.models.list()) found.push(one.id);
    expect(found.includes(model), found);
    return found;
  },
  async chat() {
    const answer = await client.chat.completions.create(ask(question));
    expect(answer.choices[0].message.content.includes("Tokyo"), answer.choices);
    return answer.choices[0].message.content;
  },
  async stream() {
    let text = "", chunks = 0, words = "";
    for await (const chunk of await client.chat.completions.create(ask(question, { stream: true }))) {
      text += chunk.choices[0]?.delta?.content ?? "";
      chunks += 1;
    }
    expect(chunks > 3 && text.includes("Tokyo"), [chunks, text]);
    const stream = client.responses.stream({ model, input: question, temperature: 0, max_output_tokens: 64 });
    stream.on("response.output_text.delta", (event) => { words += event.delta; });
    const final = await stream.finalResponse();
    expect(words === text && final.output_text === text, [words, final.output_text]);
    return `${chunks} chunks; the same by /v1/responses`;
  },
  async tool() {
    const tools = [{ type: "function", function: tool }];
    const answer = await client.chat.completions.create(ask(weather, { tools, tool_choice: "required" }));
    const [call] = answer.choices[0].message.tool_calls;
    expect(call.function.name === "get_weather", call);
    expect(typeof JSON.parse(call.function.arguments).city === "string", call);
    const response = await client.responses.create({
      model, input: weather, tools: [{ type: "function", strict: true, ...tool }], tool_choice: "required",
      temperature: 0, max_output_tokens: 64,
    });
    const item = response.output.find((one) => one.type === "function_call");
    expect(typeof JSON.parse(item.arguments).city === "string", item);
    return `get_weather(${call.function.arguments}); the same by /v1/responses`;
  },
  async schema() {
    const json_schema = { name: "capital", schema: capital_schema, strict: true };
    const answer = await client.chat.completions.parse(
      ask(question, { response_format: { type: "json_schema", json_schema } }));
    const found = JSON.parse(answer.choices[0].message.content);
    expect(typeof found.capital === "string" && Number.isInteger(found.population), found);
    return JSON.stringify(found);
  },
  async error() {
    try {
      await client.chat.completions.create(ask(question, { model: no_model }));
    } catch (error) {
      expect(error instanceof OpenAI.NotFoundError && error.code === "model_not_found", String(error));
      expect(error.message.includes(no_model) && error.message.includes(model), error.message);
      return error.message;
    }
    throw Error("no error");
  },
  async usage() {
    const counts = [];
    for (const _ of [1, 2]) {
      const answer = await client.chat.completions.create(ask(long, { max_tokens: 4 }));
      counts.push(answer.usage.prompt_tokens_details.cached_tokens);
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
