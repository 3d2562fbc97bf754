// Calls to paste: curl, Python and JavaScript, for what a model does. They read the token from the environment, so that
// none is in a file or on a screen.

const QUESTION = {
  system: 'You are the assistant of Harbour Books. Opening hours: Monday to Friday, 9:00 to 18:00.',
  user: 'When are you open?',
};
const TEXTS = ['The reading room is on the second floor.', 'Books may be kept for 21 days.'];

/** The snippets of a model: `[language, code]`. `base` is the gateway's address. */
export function snippets({ base, model, task }) {
  if (task === 'Text Embeddings') return embeddings(base, model);
  if (task === 'Text Classification') return rerank(base, model);
  return chat(base, model);
}

/** The body of the first call, as the snippets send it. */
export function firstBody(model) {
  return {
    model,
    messages: [{ role: 'system', content: QUESTION.system }, { role: 'user', content: QUESTION.user }],
  };
}

function chat(base, model) {
  return [
    ['curl', curl(`${base}/v1/chat/completions`, { ...firstBody(model), stream: true }, '-N ')],
    ['Python', `# pip install openai
import os
from openai import OpenAI

client = OpenAI(base_url="${base}/v1", api_key=os.environ["TOKEN"])
answer = client.chat.completions.create(
    model=${quoted(model)},
    messages=[
        {"role": "system", "content": ${quoted(QUESTION.system)}},
        {"role": "user", "content": ${quoted(QUESTION.user)}},
    ],
    stream=True,
)
for chunk in answer:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()`],
    ['JavaScript', `// npm install openai
import OpenAI from "openai";

const client = new OpenAI({ baseURL: "${base}/v1", apiKey: process.env.TOKEN });
const answer = await client.chat.completions.create({
  model: ${quoted(model)},
  messages: [
    { role: "system", content: ${quoted(QUESTION.system)} },
    { role: "user", content: ${quoted(QUESTION.user)} },
  ],
  stream: true,
});
for await (const chunk of answer) process.stdout.write(chunk.choices[0].delta.content ?? "");
console.log();`],
  ];
}

function embeddings(base, model) {
  return [
    ['curl', curl(`${base}/v1/embeddings`, { model, input: TEXTS })],
    ['Python', `# pip install openai
import os
from openai import OpenAI

client = OpenAI(base_url="${base}/v1", api_key=os.environ["TOKEN"])
answer = client.embeddings.create(model=${quoted(model)}, input=${JSON.stringify(TEXTS)})
for item in answer.data:
    print(item.index, len(item.embedding), item.embedding[:4])`],
    ['JavaScript', `// npm install openai
import OpenAI from "openai";

const client = new OpenAI({ baseURL: "${base}/v1", apiKey: process.env.TOKEN });
const answer = await client.embeddings.create({ model: ${quoted(model)}, input: ${JSON.stringify(TEXTS)} });
for (const item of answer.data) console.log(item.index, item.embedding.length, item.embedding.slice(0, 4));`],
  ];
}

function rerank(base, model) {
  const body = { model, query: 'How long may I keep a book?', documents: TEXTS };
  return [
    ['curl', curl(`${base}/v1/rerank`, body)],
    ['Python', `import json, os, urllib.request

body = ${JSON.stringify(body)}
request = urllib.request.Request(
    "${base}/v1/rerank",
    data=json.dumps(body).encode(),
    headers={"Authorization": f"Bearer {os.environ['TOKEN']}", "Content-Type": "application/json"},
)
for result in json.load(urllib.request.urlopen(request))["results"]:
    print(result["index"], result["relevance_score"])`],
    ['JavaScript', `const answer = await fetch("${base}/v1/rerank", {
  method: "POST",
  headers: { Authorization: \`Bearer \${process.env.TOKEN}\`, "Content-Type": "application/json" },
  body: JSON.stringify(${JSON.stringify(body)}),
});
for (const result of (await answer.json()).results) console.log(result.index, result.relevance_score);`],
  ];
}

/** A line for a shell. */
export function curl(url, body, flags = '') {
  const content = written(body).replaceAll("'", `'\\''`);
  const address = url.includes('?') ? `'${url}'` : url; // a shell would look for files like that
  return `curl -s ${flags}${address} \\
  -H "Authorization: Bearer $TOKEN" \\
  -H "Content-Type: application/json" \\
  -d '${content}'`;
}

/** JSON with a line for each field, and for each item of a list of objects. */
function written(body) {
  const fields = Object.entries(body).map(([name, value]) => `  ${JSON.stringify(name)}: ${listed(value)}`);
  return `{\n${fields.join(',\n')}\n}`;
}

function listed(value) {
  if (!Array.isArray(value) || typeof value[0] !== 'object') return JSON.stringify(value);
  return `[\n${value.map((item) => `    ${JSON.stringify(item)}`).join(',\n')}\n  ]`;
}

/** A snippet with a token in the place of where it comes from. */
export function withToken(code, token) {
  const literal = JSON.stringify(token);
  return code
    .replaceAll('$TOKEN', token)
    .replaceAll('os.environ["TOKEN"]', literal)
    .replaceAll("{os.environ['TOKEN']}", token)
    .replaceAll('${process.env.TOKEN}', token)
    .replaceAll('process.env.TOKEN', literal);
}

/** A text as a literal that Python and JavaScript read alike. */
const quoted = (text) => JSON.stringify(text);
