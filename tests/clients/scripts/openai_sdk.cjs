// OpenAI's SDK for JavaScript against a router: openai_sdk.cjs URL MODEL
const assert = require("node:assert");
const OpenAI = require("openai");
const { runChecks } = require("./checks.cjs");

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "unused", maxRetries: 0, timeout: 60000 });
const messages = [{ role: "user", content: "Tell me a story." }];
const request = { model, messages, max_completion_tokens: 8, temperature: 0 };

async function models() {
  const ids = [];
  for await (const each of client.models.list()) ids.push(each.id);
  assert.deepEqual(ids, [model]);
}

async function chat() {
  const answer = await client.chat.completions.create(request);
  assert(answer.choices[0].message.content);
  const turns = [...messages, answer.choices[0].message, ...messages];
  assert((await client.chat.completions.create({ ...request, messages: turns })).choices[0].message.content);
}

async function chatStream() {
  const stream = await client.chat.completions.create({
    ...request,
    stream: true,
    stream_options: { include_usage: true },
  });
  let text = "";
  let usage = null;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert(text);
  assert(usage.completion_tokens > 0);
}

async function chatStreamHelper() {
  const answer = await client.chat.completions.stream(request).finalChatCompletion();
  assert(answer.choices[0].message.content);
}

async function optionalFields() {
  const named = [{ ...messages[0], name: "ann" }];
  const more = { metadata: { a: "b" }, user: "u", store: true, verbosity: "low", tool_choice: "none" };
  await client.chat.completions.create({ ...request, ...more, messages: named });
}

async function completions() {
  const answer = await client.completions.create({ model, prompt: ["Once", "There was"], max_tokens: 4 });
  assert.deepEqual(answer.choices.map((choice) => choice.index), [0, 1]);
}

async function completionsStream() {
  const stream = await client.completions.create({ model, prompt: "Once", max_tokens: 8, stream: true });
  let text = "";
  for await (const chunk of stream) text += chunk.choices[0].text;
  assert(text);
}

async function abort() {
  const stream = await client.chat.completions.create({ ...request, stream: true });
  for await (const _ of stream) break;
}

async function errors() {
  await assert.rejects(client.completions.create({ model: "other", prompt: "x" }), OpenAI.NotFoundError);
  const bad = client.chat.completions.create({ ...request, temperature: -1 });
  await assert.rejects(bad, (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature");
}

runChecks("openai", [
  models,
  chat,
  chatStream,
  chatStreamHelper,
  optionalFields,
  completions,
  completionsStream,
  abort,
  errors,
]);
