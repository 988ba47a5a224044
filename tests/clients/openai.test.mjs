// The npm `openai` client against the server that KAKERA_URL names. Run by test_npm.py.
import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { nobodyRuns, url } from "./server.mjs";

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const ask = (content, more = {}) => ({ model: "mini", messages: [{ role: "user", content }], ...more });
const parameters = {
  type: "object",
  properties: { city: { type: "string" }, days: { type: "integer" } },
  required: ["city", "days"],
  additionalProperties: false,
};
const weather = { type: "function", function: { name: "weather", parameters } };
const animal = {
  type: "object",
  properties: { name: { type: "string" }, legs: { type: "integer" } },
  required: ["name", "legs"],
  additionalProperties: false,
};

test("a whole answer", async () => {
  const answer = await client.chat.completions.create(ask("hi"));
  const [choice] = answer.choices;
  assert.equal(choice.message.content, "Hello there.");
  assert.equal(choice.message.reasoning_content.trim(), "Thought.");
  assert.equal(choice.finish_reason, "stop");
  assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
});

test("a streamed answer is the same, and its last chunk has the usage", async () => {
  const body = ask("hi", { stream: true, stream_options: { include_usage: true } });
  let text = "";
  let last;
  for await (const chunk of await client.chat.completions.create(body)) {
    text += chunk.choices[0]?.delta.content ?? "";
    last = chunk;
  }
  assert.equal(text, "Hello there.");
  assert.ok(last.usage.completion_tokens > 3);
});

test("a streamed call is put together by the client's helper", async () => {
  const stream = client.chat.completions.stream(ask("umbrella?", { tools: [weather] }));
  const { choices } = await stream.finalChatCompletion();
  assert.equal(choices[0].finish_reason, "tool_calls");
  const [call] = choices[0].message.tool_calls;
  assert.equal(call.function.name, "weather");
  assert.deepEqual(JSON.parse(call.function.arguments), { city: "Oslo", days: 2 });
});

test("the client's tool loop runs the tool and brings its result", async () => {
  const asked = [];
  const run = (given) => {
    asked.push(given);
    return "rain at all hours";
  };
  const tool = { type: "function", function: { ...weather.function, function: run, parse: JSON.parse } };
  const runner = client.chat.completions.runTools(ask("umbrella?", { tools: [tool] }));
  assert.equal(await runner.finalContent(), "It rains.");
  assert.deepEqual(asked, [{ city: "Oslo", days: 2 }]);
});

test("an answer of a schema", async () => {
  const format = { type: "json_schema", json_schema: { name: "animal", schema: animal, strict: true } };
  const answer = await client.chat.completions.parse(ask("an animal", { response_format: format }));
  assert.deepEqual(JSON.parse(answer.choices[0].message.content), { name: "fox", legs: 4 });
});

test("responses: whole, streamed, a call, a form", async () => {
  const whole = await client.responses.create({ model: "mini", input: "hi" });
  assert.equal(whole.output_text, "Hello there.");
  assert.deepEqual(whole.output.map((item) => item.type), ["reasoning", "message"]);

  const streamed = await client.responses.stream({ model: "mini", input: "hi" }).finalResponse();
  assert.equal(streamed.output_text, "Hello there.");
  assert.deepEqual(streamed.usage.output_tokens, whole.usage.output_tokens);

  const tools = [{ type: "function", strict: true, ...weather.function }];
  const called = await client.responses.stream({ model: "mini", input: "umbrella?", tools }).finalResponse();
  const call = called.output.at(-1);
  assert.equal(call.type, "function_call");
  assert.deepEqual(JSON.parse(call.arguments), { city: "Oslo", days: 2 });

  const result = { type: "function_call_output", call_id: call.call_id, output: "rain at all hours" };
  const input = [{ role: "user", content: "umbrella?" }, ...called.output, result];
  assert.equal((await client.responses.create({ model: "mini", input, tools })).output_text, "It rains.");

  const text = { format: { type: "json_schema", name: "animal", schema: animal, strict: true } };
  const formed = await client.responses.parse({ model: "mini", input: "an animal", text });
  assert.deepEqual(formed.output_parsed, { name: "fox", legs: 4 });
});

test("models", async () => {
  const names = [];
  for await (const model of client.models.list()) names.push(model.id);
  assert.deepEqual(names, ["mini"]);
});

test("errors are the client's classes, with status, code and field", async () => {
  const wrong = client.chat.completions.create(ask("hi", { temperature: 9 }));
  await assert.rejects(wrong, (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.deepEqual([error.status, error.code, error.param], [400, "invalid_value", "temperature"]);
    return true;
  });
  const missing = client.chat.completions.create({ ...ask("hi"), model: "other", stream: true });
  await assert.rejects(missing, (error) => error instanceof OpenAI.NotFoundError && error.code === "model_not_found");
  const stored = client.responses.create({ model: "mini", input: "hi", previous_response_id: "resp_1" });
  await assert.rejects(stored, (error) => error.status === 400 && error.param === "previous_response_id");
});

test("leaving a stream or a whole answer ends its request", async () => {
  const stream = await client.chat.completions.create(ask("endless", { stream: true }));
  let chunks = 0;
  for await (const chunk of stream) if (chunk && ++chunks > 5) stream.controller.abort();
  await nobodyRuns();

  const leaving = new AbortController();
  setTimeout(() => leaving.abort(), 200);
  const whole = client.chat.completions.create(ask("endless"), { signal: leaving.signal });
  await assert.rejects(whole, OpenAI.APIUserAbortError);
  await nobodyRuns();
});
