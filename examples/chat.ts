// A chat answer, shown as it comes, with OpenAI's SDK for JavaScript and TypeScript.
import OpenAI from "openai";

const client = new OpenAI({
  baseURL: `${process.env.PDSERVE_URL ?? "http://127.0.0.1:8000"}/v1`,
  apiKey: process.env.PDSERVE_API_KEY ?? "none",
});
const models = await client.models.list();
const stream = await client.chat.completions.create({
  model: models.data[0].id,
  messages: [{ role: "user", content: "Tell me a story." }],
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  process.stdout.write(chunk.choices[0]?.delta.content ?? "");
  if (chunk.usage) console.log(`\n(${chunk.usage.completion_tokens} tokens)`);
}
