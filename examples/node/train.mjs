// Fine-tunes a model to say one sequence by heart, from Node, over gRPC: no SDK, only proto/ and a key.
//
//   npm install && TINSMITH_GRPC=127.0.0.1:8001 TINKER_API_KEY=tml-... npm start
//
// TINSMITH_STATE names a file in which a run leaves its session and model until it is done. Started again with
// it, a run that was killed goes on after its last request.
import {randomUUID} from "node:crypto";
import {existsSync, readFileSync, rmSync, writeFileSync} from "node:fs";
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

/** Tokens of a sample as they are generated. A stream that breaks off is asked for again, and begins anew. */
async function* tokens(sample, seconds = 600) {
  let known = 0;
  for (let attempt = 1; ; attempt++) {
    const stream = client.StreamSample({sample}, metadata, {deadline: Date.now() + 1000 * seconds});
    try {
      for await (const {new_tokens} of stream) {
        if (!new_tokens) continue;
        const {data} = new_tokens.tokens;
        const fresh = Array.from({length: data.length / 4}, (_, i) => data.readInt32LE(4 * i));
        const added = fresh.slice(known - (new_tokens.start ?? 0));
        known += added.length;
        if (added.length) yield added;
      }
      return;
    } catch (error) {
      if (attempt === 8 || ![grpc.status.UNAVAILABLE, grpc.status.RESOURCE_EXHAUSTED].includes(error.code)) throw error;
      await new Promise((wake) => setTimeout(wake, 250 * 2 ** Math.min(attempt, 4)));
    }
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

/** A new session with a model. */
async function begin() {
  const base = await baseModel();
  console.log(`training ${base.name}`);
  const {session_id} = await call("CreateSession", {tags: ["node"], idempotency_key: randomUUID()});
  const lora = {rank: 8, seed: 1, train_attn: true, train_mlp: true, train_unembed: true};
  const created = await call("CreateModel", {session_id, model_seq_id: 0, base_model: base.name, lora});
  await result(created);
  return {session_id, model_id: created.model_id};
}

const kept = process.env.TINSMITH_STATE;
const earlier = kept && existsSync(kept) ? JSON.parse(readFileSync(kept, "utf8")) : undefined;
const {session_id, model_id} = earlier ?? (await begin());
if (kept) writeFileSync(kept, JSON.stringify({session_id, model_id}));
const heartbeat = setInterval(() => call("Heartbeat", {session_id}).catch(console.error), 10_000);
// The last number that was used: requests of a model are numbered 1, 2, 3 ...
let seq_id = (await call("GetModelInfo", {model_id})).last_seq_id ?? 0;
if (earlier) console.log(`going on after request ${seq_id}`);

const sequence = Array.from({length: 24}, (_, i) => (37 * i + 11) % 200);
const datum = {
  tokens: tensor("INT32", Int32Array, sequence.slice(0, -1)),
  loss_inputs: {
    target_tokens: tensor("INT64", BigInt64Array, sequence.slice(1).map(BigInt)),
    weights: tensor("FLOAT32", Float32Array, sequence.slice(1).map(() => 1)),
  },
};
const adam = {learning_rate: 0.002, beta1: 0.9, beta2: 0.95, eps: 1e-8};
// Until the sequence is known by heart, which a model with random weights does not get to in sixty steps.
for (let step = Math.floor(seq_id / 2) + 1, loss = Infinity; step <= 60 && loss > 1; step++) {
  const forward_backward = {data: [datum], loss_fn: "cross_entropy"};
  const sent = await call("ForwardBackward", {model_id, seq_id: ++seq_id, forward_backward});
  const stepped = await call("OptimStep", {model_id, seq_id: ++seq_id, adam});
  const {metrics} = (await result(sent)).forward_backward;
  await result(stepped);
  loss = metrics["loss:sum"];
  if (step % 5 === 0) console.log(`step ${step} loss ${loss.toFixed(3)}`);
}

const {save_state} = await result(await call("SaveState", {model_id, seq_id: ++seq_id, name: "by-heart", overwrite: true}));
console.log(`saved ${save_state.path}`);
const saved = await call("SaveForSampler", {model_id, seq_id: ++seq_id, sampling_session_seq_id: 0});
await result(saved);
const said = [];
for await (const added of tokens({
  sampling_session_id: saved.sampling_session_id,
  seq_id: 0,
  prompt: tensor("INT32", Int32Array, sequence.slice(0, 4)),
  num_samples: 1,
  params: {max_tokens: sequence.length - 4, temperature: 0, top_k: -1, top_p: 1, stop: {never: {}}},
})) {
  said.push(...added);
  console.log(`said ${added.join(" ")}`);
}
const right = said.filter((token, i) => token === sequence[4 + i]).length;
console.log(`said ${right} of ${sequence.length - 4} tokens by heart`);

clearInterval(heartbeat);
if (kept) rmSync(kept);
await call("FinishSession", {session_id, reason: "FINISH_REASON_SUCCESS"});
client.close();
