// Fine-tunes a model to say one sequence by heart, from Node, over gRPC: no SDK, only proto/ and a key.
//
//   npm install && TINSMITH_GRPC=127.0.0.1:8001 TINKER_API_KEY=tml-... npm start
import {fileURLToPath} from "node:url";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const address = process.env.TINSMITH_GRPC ?? "127.0.0.1:8001";
const key = process.env.TINKER_API_KEY;
if (!key) throw new Error("set TINKER_API_KEY to a key of the cluster");

const proto = fileURLToPath(new URL("../../proto", import.meta.url));
const definition = loader.loadSync("tinsmith/v1/service.proto", {
  includeDirs: [proto], keepCase: true, longs: Number, enums: String, defaults: false, oneofs: true,
});
const {TinsmithService} = grpc.loadPackageDefinition(definition).tinsmith.v1;
const client = new TinsmithService(address, grpc.credentials.createInsecure());
const metadata = new grpc.Metadata();
metadata.set("x-api-key", key);

/** One call with a deadline. What only failed to arrive is sent again: every call may be repeated. */
async function call(method, request, seconds = 30) {
  for (let attempt = 1; ; attempt++) {
    try {
      return await new Promise((resolve, reject) => {
        const options = {deadline: Date.now() + 1000 * seconds};
        client[method](request, metadata, options, (error, reply) => (error ? reject(error) : resolve(reply)));
      });
    } catch (error) {
      const {UNAVAILABLE, RESOURCE_EXHAUSTED, DEADLINE_EXCEEDED} = grpc.status;
      if (attempt === 8 || ![UNAVAILABLE, RESOURCE_EXHAUSTED, DEADLINE_EXCEEDED].includes(error.code)) throw error;
      await new Promise((wake) => setTimeout(wake, 250 * 2 ** Math.min(attempt, 4)));
    }
  }
}

/** The result of a request, however long it takes. */
async function result({request_id}) {
  for (;;) {
    const reply = await call("GetResult", {request_id, timeout_seconds: 30}, 60);
    if (reply.result?.error) throw new Error(`${request_id}: ${reply.result.error.message}`);
    if (reply.result) return reply.result;
    if (reply.waiting_for) console.log(reply.waiting_for);
  }
}

/** A tensor of one dimension: little-endian bytes with their type and shape. */
function tensor(dtype, array, values) {
  const typed = array.from(values);
  return {dtype: `DATA_TYPE_${dtype}`, shape: [typed.length], data: Buffer.from(typed.buffer)};
}

/** A base model that can be trained and sampled; while there is none, says what it waits for. */
async function baseModel(minutes = 15) {
  let said = "";
  for (const end = Date.now() + 60_000 * minutes; Date.now() < end; ) {
    const {models = []} = await call("ListModels", {});
    const base = models.find((model) => model.trainable && model.sampleable);
    if (base?.architecture) return base;
    const awaited = base
      ? `waiting for a trainer or sampler of ${base.name}, which still loads`
      : `waiting for a base model with a trainer and a sampler (here: ${models.map(({name}) => name).join(", ") || "none"})`;
    if (awaited !== said) console.log((said = awaited));
    await new Promise((wake) => setTimeout(wake, 1000));
  }
  throw new Error(`no base model after ${minutes} minutes; tinsmith status says what the cluster is doing`);
}

const base = await baseModel();
console.log(`training ${base.name}`);

const {session_id} = await call("CreateSession", {tags: ["node"]});
const heartbeat = setInterval(() => call("Heartbeat", {session_id}).catch(console.error), 10_000);
const lora = {rank: 8, seed: 1, train_attn: true, train_mlp: true, train_unembed: true};
const created = await call("CreateModel", {session_id, model_seq_id: 0, base_model: base.name, lora});
await result(created);
const {model_id} = created;

const sequence = Array.from({length: 24}, (_, i) => (37 * i + 11) % 200);
const datum = {
  tokens: tensor("INT32", Int32Array, sequence.slice(0, -1)),
  loss_inputs: {
    target_tokens: tensor("INT64", BigInt64Array, sequence.slice(1).map(BigInt)),
    weights: tensor("FLOAT32", Float32Array, sequence.slice(1).map(() => 1)),
  },
};
const adam = {learning_rate: 0.002, beta1: 0.9, beta2: 0.95, eps: 1e-8};
let seq_id = 0; // the last one used: requests of a model are numbered 1, 2, 3 ...
// Until the sequence is known by heart, which a model with random weights does not get to in sixty steps.
for (let step = 1, loss = Infinity; step <= 60 && loss > 1; step++) {
  const forward_backward = {data: [datum], loss_fn: "cross_entropy"};
  const sent = await call("ForwardBackward", {model_id, seq_id: ++seq_id, forward_backward});
  const stepped = await call("OptimStep", {model_id, seq_id: ++seq_id, adam});
  const {metrics} = (await result(sent)).forward_backward;
  await result(stepped);
  loss = metrics["loss:sum"];
  if (step % 5 === 0) console.log(`step ${step} loss ${loss.toFixed(3)}`);
}

const saved = await call("SaveForSampler", {model_id, seq_id: ++seq_id, sampling_session_seq_id: 0});
await result(saved);
const sampled = await call("Sample", {
  sampling_session_id: saved.sampling_session_id,
  seq_id: 0,
  prompt: tensor("INT32", Int32Array, sequence.slice(0, 4)),
  num_samples: 1,
  params: {max_tokens: sequence.length - 4, temperature: 0, top_k: -1, top_p: 1, stop: {never: {}}},
});
const {sequences} = (await result(sampled)).sample;
const bytes = sequences[0].tokens.data;
const tokens = Array.from({length: bytes.length / 4}, (_, i) => bytes.readInt32LE(4 * i));
const right = tokens.filter((token, i) => token === sequence[4 + i]).length;
console.log(`said ${right} of ${sequence.length - 4} tokens by heart`);

clearInterval(heartbeat);
await call("FinishSession", {session_id, reason: "FINISH_REASON_SUCCESS"});
client.close();
