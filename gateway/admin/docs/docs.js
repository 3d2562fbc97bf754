// Draws the gateway's OpenAPI document: every operation, field, status and code. It knows nothing of Hearth beside
// the document but some sample values. All text is set as text, so that none of it can be markup.

const GROUPS = [
  ["inference", "Models: ask them, list them"],
  ["account", "An account: tokens, limits, usage"],
  ["operator", "Operator: all accounts, plans, machines"],
  ["gateway", "Gateway: probes and documents"],
];
const MODEL = "@cf/hearth/ember";
const MESSAGES = [{ role: "user", content: "What is a hearth?" }];
// Sample bodies where the required fields alone would say little.
const BODIES = {
  RunNativeBody: { messages: MESSAGES },
  RunBody: { model: MODEL, input: { messages: MESSAGES } },
  ChatBody: { model: MODEL, messages: MESSAGES },
  CompletionsBody: { model: MODEL, prompt: "A hearth is", max_tokens: 32 },
  EmbeddingsBody: { model: MODEL, input: "What is a hearth?" },
  RerankBody: { model: MODEL, query: "What is a hearth?", documents: ["The floor of a fireplace", "A kind of fish"] },
  ResponsesBody: { model: MODEL, input: "What is a hearth?" },
  InputTokensBody: { model: MODEL, input: "What is a hearth?" },
  MessagesBody: { model: MODEL, max_tokens: 64, messages: MESSAGES },
  CountTokensBody: { model: MODEL, messages: MESSAGES },
  TokenGiven: { name: "ci", policies: [{ permission_groups: [{ id: "inference" }] }] },
  NewAccount: { name: "acme", plan: "default" },
  TermsChange: { plan: "team" },
  AccountChange: { settings: { zero_retention: true } },
  PlanContent: { limits: { requests_per_minute: 600, neurons_per_month: 5000000 } },
  Limits: { requests_per_minute: 60 },
  Rolled: { grace_seconds: 3600 },
};
const PLACES = { account_id: "$ACCOUNT", token_id: "$TOKEN_ID", plan: "team", request_id: "$REQUEST_ID", model: MODEL };

const METHODS = new Set(["get", "post", "put", "patch", "delete"]); // words that mean the method in a search

let description;

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

// Schemas

function resolved(node) {
  if (!node?.$ref) return node;
  const target = node.$ref.slice(2).split("/").reduce((place, part) => place[part], description);
  const { $ref, ...beside } = node;
  return { ...target, ...beside };
}

const nameOf = (schema) => schema.$ref?.split("/").pop().replace(/_+$/, "").replace(/_/g, " ");
const choices = (schema) => schema.anyOf ?? schema.oneOf ?? null;
const shown = (value) => (typeof value === "string" ? `"${value}"` : JSON.stringify(value));

function kindOf(schema) {
  if (schema.$ref) return nameOf(schema);
  if ("const" in schema) return shown(schema.const);
  if (schema.enum) return schema.enum.map(shown).join(" | ");
  if (choices(schema)) return choices(schema).map(kindOf).join(" | ");
  if (schema.type === "array") return schema.items ? `list of ${kindOf(schema.items)}` : "empty list";
  if (schema.type === "object" && typeof schema.additionalProperties === "object") {
    return `object of ${kindOf(schema.additionalProperties)}`;
  }
  if (Array.isArray(schema.type)) return schema.type.join(" | ");
  return schema.type ?? "anything";
}

const BOUNDS = {
  minimum: "at least", maximum: "at most", exclusiveMinimum: "above", exclusiveMaximum: "below", minLength: "characters at least",
  maxLength: "characters at most", minItems: "entries at least", maxItems: "entries at most", minProperties: "names at least",
  maxProperties: "names at most", pattern: "like", format: "format",
};

function boundsOf(schema) {
  const own = Object.entries(BOUNDS).filter(([key]) => key in schema).map(([key, words]) => `${words} ${schema[key]}`);
  if (schema.propertyNames) own.push(...boundsOf(schema.propertyNames).map((bound) => `names: ${bound}`));
  for (const inner of [...(choices(schema) ?? []), schema.items, schema.additionalProperties]) {
    if (inner && typeof inner === "object" && !inner.$ref) own.push(...boundsOf(inner));
  }
  return own;
}

// The schemas inside one that have fields of their own to show.
function parts(schema) {
  if (schema.$ref) return [schema];
  if (schema.properties) return [schema];
  const inner = [...(choices(schema) ?? []), schema.items, schema.additionalProperties];
  return inner.filter((each) => each && typeof each === "object").flatMap(parts);
}

function lazily(summary, draw, open = false) {
  const box = element("details", { class: "inner" }, element("summary", {}, summary));
  let drawn = false;
  const fill = () => {
    if (box.open && !drawn) { drawn = true; box.append(draw()); }
  };
  box.addEventListener("toggle", fill);
  box.open = open;
  if (open) fill();
  return box;
}

function fieldsOf(schema, above = []) {
  const whole = resolved(schema);
  const box = element("div");
  if (whole.description) box.append(element("p", { class: "about" }, whole.description));
  if (!whole.properties) {
    box.append(element("p", { class: "kind" }, [kindOf(whole), ...boundsOf(whole)].join("; ")));
    for (const part of parts(whole)) box.append(inside(part, above));
    return box;
  }
  const list = element("ul", { class: "fields" });
  for (const [name, field] of Object.entries(whole.properties)) {
    list.append(fieldRow(name, field, (whole.required ?? []).includes(name), above));
  }
  if (!list.children.length) list.append(element("li", { class: "kind" }, "no fields"));
  box.append(list);
  return box;
}

const inside = (part, above) => {
  const name = nameOf(part) ?? "fields";
  return lazily(name, () => fieldsOf(part, [...above, name]), above.length < 1 && !above.includes(name));
};

function fieldRow(name, field, required, above) {
  const bounds = boundsOf(field);
  if (field.default !== undefined && field.default !== null) bounds.push(`default ${shown(field.default)}`);
  const row = element("li", {},
    element("code", { class: "field" }, name), " ", element("span", { class: "kind" }, [kindOf(field), ...bounds].join("; ")), " ",
    required ? element("span", { class: "must" }, "required") : null,
    field.description ? element("p", { class: "about" }, field.description) : null);
  for (const part of parts(field)) row.append(inside(part, above.length ? above : [name]));
  return row;
}

// Samples

function sample(schema, name = "") {
  const label = nameOf(schema);
  if (label && BODIES[label]) return BODIES[label];
  const whole = resolved(schema);
  if ("const" in whole) return whole.const;
  if (whole.enum) return whole.enum[0];
  const choice = choices(whole)?.find((each) => each.type !== "null");
  if (choice) return sample(choice, name);
  if (whole.properties) {
    return Object.fromEntries((whole.required ?? []).map((key) => [key, sample(whole.properties[key], key)]));
  }
  if (whole.type === "array") return whole.items && whole.minItems ? [sample(whole.items, name)] : [];
  if (whole.type === "object") return {};
  if (whole.type === "integer" || whole.type === "number") return whole.minimum ?? 1;
  if (whole.type === "boolean") return true;
  return PLACES[name] ?? name;
}

const isOpen = (said) => said.security.some((one) => !("token" in one));
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

function curl(operation) {
  const { method, path, said } = operation;
  const url = location.origin + path.replace(/\{(\w+)\}/g, (_, name) => PLACES[name] ?? `$${name.toUpperCase()}`);
  const media = said.requestBody?.content["application/json"];
  const plain = method === "GET" || (method === "POST" && media);
  const lines = [`curl -s${plain ? "" : `X ${method}`} "${url}"`];
  if (!isOpen(said)) lines.push('-H "Authorization: Bearer $TOKEN"');
  if (media) lines.push(`-d ${quoted(JSON.stringify(sample(media.schema), null, 2))}`);
  return lines.join(" \\\n  ");
}

// Operations

function operationsOf(whole) {
  const found = [];
  const known = new Map(); // what is served at several paths is shown once, with all of them
  for (const [path, methods] of Object.entries(whole.paths)) {
    for (const [method, said] of Object.entries(methods)) {
      const place = { method: method.toUpperCase(), path, id: said.operationId, said };
      const key = JSON.stringify([method, said.summary, said.requestBody, path.split("/").pop()]);
      const same = said.tags[0] === "inference" ? known.get(key) : undefined;
      if (same) { same.places.push(place); continue; }
      const operation = { ...place, places: [place], words: "" };
      known.set(key, operation);
      found.push(operation);
    }
  }
  for (const operation of found) {
    operation.places.sort((a, b) => a.path.length - b.path.length);
    Object.assign(operation, operation.places[0]); // the shortest path stands for all
    operation.words = wordsOf(operation);
  }
  return found;
}

const componentWords = new Map();

function schemaWords(node, seen) {
  if (Array.isArray(node)) return node.map((each) => schemaWords(each, seen)).join(" ");
  if (!node || typeof node !== "object") return "";
  if (node.$ref) {
    if (seen.has(node.$ref)) return "";
    seen.add(node.$ref);
    if (!componentWords.has(node.$ref)) componentWords.set(node.$ref, resolved(node));
    return `${nameOf(node)} ${schemaWords(componentWords.get(node.$ref), seen)}`;
  }
  const own = Object.entries(node).map(([key, value]) => {
    if (key === "properties") return Object.keys(value).join(" ") + " " + schemaWords(Object.values(value), seen);
    if (key === "description") return String(value);
    if (key === "enum") return value.join(" ");
    return schemaWords(value, seen);
  });
  return own.join(" ");
}

function wordsOf({ places, said }) {
  const asked = [said.parameters.map((each) => `${each.name} ${each.description ?? ""}`).join(" "), said.requestBody, said.responses["200"]];
  const texts = asked.map((each) => (typeof each === "string" ? each : schemaWords(each, new Set())));
  return [...places.map((each) => `${each.method} ${each.path} ${each.id}`), said.summary, ...texts].join(" ").toLowerCase();
}

function methodMark(method) {
  return element("span", { class: `method ${method.toLowerCase()}` }, method);
}

function copyable(text) {
  const button = element("button", { type: "button", class: "copy", click: copy }, "Copy");
  async function copy() {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch { // no clipboard outside HTTPS and this host: select it, so that the keyboard's own copy does it
      getSelection().selectAllChildren(code);
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  }
  const code = element("code", {}, text);
  return element("div", { class: "example" }, element("pre", { tabindex: "0", "aria-label": "curl example" }, code), button);
}

function permissionText(said) {
  const named = said.security.flatMap((one) => one.token ?? []);
  if (isOpen(said)) return named.length ? `No token needed; more with the permission ${named.join(" or ")}.` : "No token needed.";
  return named.length ? `Permission: ${named.join(" or ")}.` : "Any token in force.";
}

function answerOf(said) {
  const box = element("div");
  for (const [type, media] of Object.entries(said.responses["200"].content)) {
    box.append(element("p", {}, element("code", {}, type)), fieldsOf(media.schema));
    if (media["x-event"]) box.append(lazily("each event", () => fieldsOf(media["x-event"]), true));
  }
  for (const [name, header] of Object.entries(said.responses["200"].headers ?? {})) {
    box.append(element("p", {}, "Header ", element("code", {}, name), `: ${resolved(header).description}`));
  }
  return box;
}

function statusesOf(said) {
  const table = element("table", { class: "statuses" }, element("thead", {}, element("tr", {},
    ...["Status", "Codes", "When"].map((head) => element("th", { scope: "col" }, head)))));
  const rows = element("tbody");
  for (const [status, ref] of Object.entries(said.responses).filter(([status]) => status !== "200")) {
    const response = resolved(ref);
    const codes = response.content["application/json"]?.schema.properties?.errors?.items.properties.code.enum ?? [];
    const headers = Object.keys(response.headers ?? {}).map((name) => `; header ${name}`).join("");
    rows.append(element("tr", {}, element("td", {}, status), element("td", {}, codes.join(", ")), element("td", {}, response.description + headers)));
  }
  table.append(rows);
  return table;
}

function bodyOf(operation) {
  const { said, places } = operation;
  const box = element("div", { class: "body" }, element("p", {}, permissionText(said)));
  if (places.length > 1) {
    box.append(element("h4", {}, "Paths"), element("ul", {}, ...places.map((each) => element("li", {}, element("code", {}, `${each.method} ${each.path}`)))));
  }
  box.append(element("h4", {}, "Example"), copyable(curl(operation)));
  if (said.parameters.length) {
    const list = element("ul", { class: "fields" });
    for (const each of said.parameters) {
      const schema = each.schema ?? each.content["application/json"].schema;
      list.append(fieldRow(each.name, { ...schema, description: [`in ${each.in === "header" ? "a header" : `the ${each.in}`}`, each.description ?? schema.description].filter(Boolean).join(": ") }, each.required, []));
    }
    box.append(element("h4", {}, "Parameters"), list);
  }
  if (said.requestBody) {
    box.append(element("h4", {}, said.requestBody.required ? "Body" : "Body (may be left out)"), fieldsOf(said.requestBody.content["application/json"].schema));
  }
  box.append(element("h4", {}, "Answer"), answerOf(said), element("h4", {}, "Other answers"), statusesOf(said));
  return box;
}

function drawOperation(operation) {
  const { method, path, said, id, places } = operation;
  const box = element("details", {}, element("summary", {}, element("h3", {}, methodMark(method), element("code", {}, path)),
    element("span", { class: "summary" }, said.summary)));
  box.addEventListener("toggle", () => {
    if (box.open && box.children.length === 1) box.append(bodyOf(operation));
  });
  const article = element("article", { class: "operation", id }, ...places.slice(1).map((each) => element("span", { id: each.id })), box);
  return { article, box };
}

// The page

function shortPath(path) {
  return path.replace("/client/v4/accounts/{account_id}", "…").replace("/client/v4", "") || path;
}

function drawGroup(tag, title, operations) {
  const section = element("section", { "aria-labelledby": `group-${tag}` }, element("h2", { id: `group-${tag}` }, title));
  const list = element("ul");
  for (const operation of operations) {
    Object.assign(operation, drawOperation(operation));
    section.append(operation.article);
    operation.link = element("li", {}, element("a", { href: `#${operation.id}` }, methodMark(operation.method), shortPath(operation.path)));
    list.append(operation.link);
  }
  const index = element("div", {}, element("h2", {}, title), list);
  document.getElementById("groups").append(section);
  document.getElementById("index").append(index);
  return { section, index, operations };
}

function filter(groups, total) {
  const wanted = document.getElementById("query").value.toLowerCase().split(/\s+/).filter(Boolean);
  let count = 0;
  for (const { section, index, operations } of groups) {
    let here = 0;
    for (const operation of operations) {
      const matches = wanted.every((word) => (METHODS.has(word) ? operation.method.toLowerCase() === word : operation.words.includes(word)));
      operation.article.hidden = operation.link.hidden = !matches;
      here += matches;
    }
    section.hidden = index.hidden = here === 0;
    count += here;
  }
  const words = wanted.length ? `${count} of ${total} operations match` : `${total} operations`;
  document.getElementById("status").textContent = count || !wanted.length ? words : "No operation has all of these words; try fewer.";
}

function openHash(groups) {
  const id = decodeURIComponent(location.hash.slice(1));
  const operation = groups.flatMap((group) => group.operations).find((each) => each.places.some((place) => place.id === id));
  if (!operation) return;
  operation.box.open = true;
  operation.article.scrollIntoView();
  operation.box.querySelector("summary").focus({ preventScroll: true });
}

function drawIntro(operations) {
  const intro = document.getElementById("intro");
  const scheme = Object.values(description.components.securitySchemes)[0];
  intro.append(
    element("p", {}, description.info.description),
    element("p", {}, "A token goes into ", element("code", {}, "Authorization: Bearer …"), `: ${scheme.description}. The examples read it from `,
      element("code", {}, "TOKEN"), " and the account from ", element("code", {}, "ACCOUNT"), "."),
    element("p", {}, element("button", { type: "button", click: () => { for (const each of operations) if (!each.article.hidden) each.box.open = true; } }, "Open all shown"), " ",
      element("button", { type: "button", click: () => { for (const each of operations) each.box.open = false; } }, "Close all")),
    lazily("Every error's body", () => fieldsOf({ $ref: "#/components/schemas/Error" })));
  intro.hidden = false;
}

async function start() {
  const status = document.getElementById("status");
  if (matchMedia("(max-width: 52rem)").matches) document.getElementById("contents").open = false;
  try {
    const answer = await fetch("/client/v4/openapi.json");
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    description = await answer.json();
  } catch (problem) {
    status.textContent = `The gateway's description could not be loaded (${problem.message}). Reload the page once the gateway answers.`;
    return;
  }
  const operations = operationsOf(description);
  drawIntro(operations);
  const groups = GROUPS.map(([tag, title]) => drawGroup(tag, title, operations.filter((each) => each.said.tags[0] === tag)));
  const query = document.getElementById("query");
  query.addEventListener("input", () => filter(groups, operations.length));
  document.getElementById("search").addEventListener("submit", (event) => event.preventDefault());
  addEventListener("keydown", (event) => {
    if (event.key === "/" && !/^(INPUT|TEXTAREA)$/.test(event.target.tagName)) { event.preventDefault(); query.focus(); }
  });
  addEventListener("hashchange", () => openHash(groups));
  filter(groups, operations.length);
  openHash(groups);
}

start();
