// grpc-js against a router: grpc_generate.cjs ADDRESS MODEL PROTOS
const assert = require("node:assert");
const { join } = require("node:path");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");
const { runChecks } = require("./checks.cjs");

const [address, model, protos] = process.argv.slice(2);
const path = join("pdserve", "v1", "inference_service.proto");
const options = { includeDirs: [protos], longs: Number, enums: String, defaults: true, oneofs: true };
const { pdserve } = grpc.loadPackageDefinition(loader.loadSync(path, options));
const client = new pdserve.v1.InferenceService(address, grpc.credentials.createInsecure());
const deadline = () => ({ deadline: Date.now() + 60000 });

function call(method, request) {
  return new Promise((resolve, reject) => {
    client[method](request, deadline(), (error, answer) => (error ? reject(error) : resolve(answer)));
  });
}

async function generate() {
  const chat = { messages: [{ role: "user", content: "Tell me a story." }] };
  const stream = client.Generate({ model, chat, samplingParams: { maxTokens: 8 } }, deadline());
  let text = "";
  let last = null;
  for await (const { output } of stream) {
    for (const completion of output.outputs) text += completion.text;
    last = output;
  }
  assert(text);
  assert(last.finished);
  assert(last.usage.numOutputTokens > 0);
}

async function tokenizeAndBack() {
  const { tokenIds } = await call("Tokenize", { model, text: "Once upon" });
  assert((await call("Detokenize", { model, tokenIds })).text.includes("Once upon"));
}

async function listModels() {
  const { models } = await call("ListModels", {});
  assert.equal(models[0].id, model);
}

async function errors() {
  const stream = client.Generate({ model, text: "x", samplingParams: { temperature: -1 } }, deadline());
  const drain = async () => {
    for await (const _ of stream);
  };
  await assert.rejects(drain(), (error) => error.code === grpc.status.INVALID_ARGUMENT && /temperature/.test(error.details));
}

runChecks("@grpc/grpc-js", [generate, tokenizeAndBack, listModels, errors]);
