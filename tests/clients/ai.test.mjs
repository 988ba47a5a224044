// The npm `ai` package (Vercel's AI SDK) against the server that KAKERA_URL names, over chat completions and over
// Anthropic's messages. Run by test_npm.py.
import assert from "node:assert/strict";
import { test } from "node:test";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { nobodyRuns, url } from "./server.mjs";

const settings = { name: "kakera", baseURL: `${url}/v1`, includeUsage: true, supportsStructuredOutputs: true };
const chat = createOpenAICompatible(settings)("mini");
const messages = createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })("mini");
const weather = tool({
  description: "Tells the weather",
  inputSchema: z.object({ city: z.string(), days: z.number().int() }),
  execute: ({ city, days }) => `rain at all hours in ${city} for ${days} days`,
});
const maxRetries = 0;

for (const [name, model] of Object.entries({ chat, messages })) {
  // Messages think only when they are asked to, which decides the script that is played
  const greeting = name === "chat" ? "hi" : "briefly: hi";

  test(`${name}: a whole and a streamed answer`, async () => {
    const whole = await generateText({ model, prompt: greeting, maxRetries });
    assert.equal(whole.text, "Hello there.");
    assert.equal(whole.finishReason, "stop");
    const streamed = streamText({ model, prompt: greeting, maxRetries });
    let text = "";
    for await (const piece of streamed.textStream) text += piece;
    assert.equal(text, "Hello there.");
    const usage = await streamed.usage;
    assert.equal(usage.inputTokens, whole.usage.inputTokens);
    assert.equal(usage.outputTokens, whole.usage.outputTokens);
    assert.equal(await streamed.reasoningText, name === "chat" ? "Thought." : undefined);
  });

  test(`${name}: the SDK runs a streamed call and brings its result`, async () => {
    const prompt = name === "chat" ? "umbrella?" : "parasol?";
    const streamed = streamText({ model, prompt, tools: { weather }, stopWhen: stepCountIs(2), maxRetries });
    await streamed.consumeStream();
    const [called, answered] = await streamed.steps;
    assert.deepEqual(called.toolCalls[0].input, { city: "Oslo", days: 2 });
    assert.equal(called.finishReason, "tool-calls");
    assert.match(answered.text, /It rains\.$/);
  });

  test(`${name}: errors`, async () => {
    const wrong = generateText({ model, prompt: greeting, temperature: 9, topP: 7, maxRetries });
    await assert.rejects(wrong, (error) => {
      assert.ok(APICallError.isInstance(error), error);
      assert.equal(error.statusCode, 400);
      assert.match(error.message, /temperature|top_p/);
      return true;
    });
  });

  test(`${name}: leaving a stream ends its request`, async () => {
    const leaving = new AbortController();
    const abortSignal = leaving.signal;
    const streamed = streamText({ model, prompt: "endless", abortSignal, maxRetries, onError: () => {} });
    let pieces = 0;
    for await (const piece of streamed.textStream) if (piece && ++pieces > 5) leaving.abort();
    await nobodyRuns();
  });
}

test("chat: an answer of a schema", async () => {
  const output = Output.object({ schema: z.object({ name: z.string(), legs: z.number().int() }) });
  const answer = await generateText({ model: chat, prompt: "an animal", output, maxRetries });
  assert.deepEqual(answer.output, { name: "fox", legs: 4 });
});

test("messages: thinking, when it is asked for", async () => {
  const providerOptions = { anthropic: { thinking: { type: "enabled", budgetTokens: 1024 } } };
  const answer = await generateText({ model: messages, prompt: "hi", providerOptions, maxRetries });
  assert.equal(answer.text, "Hello there.");
  assert.equal(answer.reasoningText.trim(), "Thought.");
});
