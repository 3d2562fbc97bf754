// The playground: a conversation with a model, or with two side by side, with every answer's time, tokens and cost.

import { answer } from '../lib/answer.js';
import { withQuery } from '../lib/api.js';
import { codeBlock, openDialog } from '../lib/dialog.js';
import { button, h, put } from '../lib/dom.js';
import { FieldProblem, field, form } from '../lib/form.js';
import { icon } from '../lib/icons.js';
import { TEXT, models } from '../lib/models.js';
import { emptyBox } from '../lib/page.js';
import { curl } from '../lib/snippets.js';

const TOOL = [{ type: 'function', function: { name: 'get_weather', description: 'The weather in a city', parameters: { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] } } }];
const SCHEMA = { type: 'object', properties: { name: { type: 'string' }, age: { type: 'integer' } }, required: ['name', 'age'], additionalProperties: false };
const FORMS = [['text', 'Text'], ['json_object', 'Any JSON object'], ['json_schema', 'JSON by a schema']];

export function show(page) {
  const place = h('div');
  page.append(place);
  page.load(place, async (signal) => {
    const writers = (await models(page, { signal })).filter(({ task }) => task === TEXT);
    if (!writers.length) return emptyBox('No model that writes text may be called with this token.');
    return playground(page, writers);
  });
}

function playground(page, writers) {
  const settings = new Settings();
  const columns = h('div', { class: 'play-columns' });
  const talks = [];
  const compare = button('', () => (talks.length > 1 ? drop() : join()), { kind: 'small' });
  const text = field({ name: 'prompt', label: 'Your message', type: 'textarea', rows: 3, required: true });
  const send = button('Send', null, { kind: 'primary', type: 'submit' });
  const stop = button([icon('stop'), 'Stop'], () => talks.forEach((talk) => talk.stop()), { disabled: true });
  const composer = h('form', { class: 'composer card', method: 'post', novalidate: true, 'aria-label': 'Message' }, text.element,
    h('div', { class: 'row' }, send, stop,
      button('Clear', () => talks.forEach((talk) => talk.clear()), { kind: 'quiet' }),
      button('As curl', () => showCurl(), { kind: 'quiet' }),
      h('small', {}, h('kbd', {}, 'Ctrl'), ' ', h('kbd', {}, 'Enter'), ' sends')));

  function join() {
    const free = writers.filter(({ name }) => !talks.some((talk) => talk.model.name === name));
    const other = free.find(({ name }) => name === page.query.get('model')) ?? free[0] ?? writers[0];
    const talk = new Talk(page, writers, other, working);
    talks.push(talk);
    columns.append(talk.element);
    put(compare, talks.length > 1 ? 'One model' : 'Compare two models');
  }

  function drop() {
    const talk = talks.pop();
    talk.stop();
    talk.element.remove();
    put(compare, 'Compare two models');
  }

  function working() {
    const busy = talks.some((talk) => talk.busy);
    stop.disabled = !busy;
    send.disabled = busy;
  }

  async function submit(event) {
    event?.preventDefault();
    if (send.disabled) return;
    try {
      const prompt = text.value();
      const call = { body: settings.body(), query: settings.query() };
      text.set('');
      const failed = await Promise.all(talks.map((talk) => talk.say(prompt, call)));
      if (failed.every(Boolean) && !text.control.value) text.set(prompt);
    } catch (error) {
      if (!(error instanceof FieldProblem)) throw error;
    }
  }

  function showCurl() {
    try {
      const body = { model: talks[0].model.name, ...settings.body([...talks[0].messages, { role: 'user', content: text.control.value || 'Hello!' }]) };
      openDialog({ title: 'The same from a shell', wide: true, body: codeBlock(curl(`${location.origin}${withQuery('/v1/chat/completions', settings.query())}`, body), { label: 'curl' }) });
    } catch (error) {
      if (!(error instanceof FieldProblem)) throw error;
    }
  }

  composer.addEventListener('submit', submit);
  text.control.addEventListener('keydown', (event) => event.key === 'Enter' && (event.ctrlKey || event.metaKey) && submit(event));
  page.signal.addEventListener('abort', () => talks.forEach((talk) => talk.stop()), { once: true });
  page.main.querySelector('.page-head').append(compare);
  join();
  return h('div', { class: 'play' }, h('div', {}, columns, composer), settings.element);
}

/** What goes with every message: the system prompt, the parameters, tools and the answer's form. */
class Settings {
  constructor() {
    const small = (name, label, props) => field({ name, label, type: 'number', placeholder: 'the model’s', ...props });
    this.system = field({ name: 'system', label: 'System prompt', type: 'textarea', rows: 5 });
    this.numbers = [
      small('temperature', 'Temperature', { min: 0, max: 2, step: 0.1 }),
      small('top_p', 'Top p', { min: 0, max: 1, step: 0.05 }),
      small('max_tokens', 'Tokens at most', { min: 1, step: 1 }),
      small('seed', 'Seed', { min: 0, step: 1, placeholder: 'drawn' }),
    ];
    this.stops = field({ name: 'stop', label: 'Stop at', placeholder: 'a text', maxlength: 64 });
    this.tags = field({
      name: 'tags', label: 'Tags', placeholder: 'such as tests,mail', maxlength: 254, pattern: '[A-Za-z0-9:\\-.\\/@, ]*',
      hint: 'Usage is summed by them: up to five, with commas between; letters, digits and : - . / @',
    });
    this.tools = field({ name: 'tools', label: 'Tools', type: 'textarea', rows: 4, class: 'mono', hint: 'A JSON list, as OpenAI has it.' });
    this.form = field({ name: 'form', label: 'The answer is', type: 'select', options: FORMS, value: 'text' });
    this.schema = field({ name: 'schema', label: 'JSON schema', type: 'textarea', rows: 6, class: 'mono', value: JSON.stringify(SCHEMA, null, 2) });
    this.schema.element.hidden = true;
    this.form.control.addEventListener('change', () => (this.schema.element.hidden = this.form.control.value !== 'json_schema'));
    const example = button('Put an example in', () => this.tools.set(JSON.stringify(TOOL, null, 2)), { kind: 'small quiet' });
    this.element = h('section', { class: 'card play-settings', 'aria-label': 'Settings' }, this.system.element,
      h('div', { class: 'form-grid' }, this.numbers.map((each) => each.element), this.stops.element),
      this.form.element, this.schema.element, this.tools.element, example, this.tags.element);
  }

  /** The body's fields that are set; `messages` come behind the system prompt. Raises FieldProblem. */
  body(messages = []) {
    const system = this.system.value();
    const body = { messages: [...(system ? [{ role: 'system', content: system }] : []), ...messages] };
    for (const each of this.numbers) if (each.value() !== null) body[each.name] = each.value();
    if (this.stops.value()) body.stop = this.stops.value();
    if (this.tools.value().trim()) body.tools = json(this.tools);
    const kind = this.form.value();
    if (kind === 'json_object') body.response_format = { type: kind };
    if (kind === 'json_schema') body.response_format = { type: kind, json_schema: { name: 'answer', schema: json(this.schema) } };
    return body;
  }

  /** What goes into the address: the tags. Raises FieldProblem. */
  query() {
    return { tags: this.tags.value().split(/[,\s]+/).filter(Boolean).join(',') };
  }
}

function json(each) {
  try {
    return JSON.parse(each.value());
  } catch (error) {
    if (error instanceof FieldProblem) throw error;
    each.fail(`This is no JSON: ${error.message}`);
    throw new FieldProblem(error.message);
  }
}

/** One column: a model, and the conversation with it. */
class Talk {
  messages = [];
  busy = false;
  #page;
  #running = null;
  #asked = null; // the form that asks for what tools answer
  #working;

  constructor(page, writers, model, working) {
    this.#page = page;
    this.#working = working;
    this.choice = field({ name: 'model', label: 'Model', type: 'select', options: writers.map(({ name }) => [name, name]), value: model.name });
    this.choice.element.querySelector('label').classList.add('visually-hidden');
    this.writers = writers;
    this.transcript = h('div', { class: 'transcript', role: 'log', 'aria-label': 'Conversation', tabindex: '0' });
    this.element = h('section', { class: 'card talk' }, h('div', { class: 'talk-head' }, this.choice.element), this.transcript);
    this.clear();
  }

  get model() {
    return this.writers.find(({ name }) => name === this.choice.control.value);
  }

  stop() {
    this.#running?.abort();
  }

  clear() {
    this.stop();
    this.messages = [];
    put(this.transcript, emptyBox('Nothing said yet.', 'A second message with the same beginning reads it from the cache.'));
  }

  /** Says something and streams the answer; whether that failed, and what was said is not part of the conversation. */
  async say(text, call) {
    if (!this.messages.length) put(this.transcript);
    if (this.#asked?.isConnected) { // calls of tools that nobody answered are none of the conversation
      this.#asked.remove();
      this.messages.pop();
    }
    const said = h('div', { class: 'message user' }, h('span', { class: 'message-who' }, 'You'), h('div', { class: 'message-text' }, text));
    this.transcript.append(said);
    this.messages.push({ role: 'user', content: text });
    const failed = await this.#answer(call);
    if (failed) this.messages.pop();
    return failed;
  }

  async #answer({ body, query }) {
    const messages = [...body.messages, ...this.messages];
    const talked = this.messages;
    this.#running = new AbortController();
    this.busy = true;
    this.#working();
    const streamed = answer({ page: this.#page, model: this.model, body: { ...body, messages }, query, signal: this.#running.signal, onText: () => this.#follow() });
    this.transcript.append(streamed.element);
    this.#follow(true);
    const { text, calls, failed } = await streamed.done;
    this.busy = false;
    this.#working();
    this.#follow();
    if (failed || talked !== this.messages) return failed;
    const made = calls.map(({ id, name, arguments: given }) => ({ id, type: 'function', function: { name, arguments: given } }));
    this.messages.push({ role: 'assistant', content: text, ...(made.length ? { tool_calls: made } : {}) });
    if (made.length) this.#askResults(made, { body, query });
    return false;
  }

  /** Asks for what the tools answer, and goes on with it. */
  #askResults(calls, call) {
    const fields = calls.map(({ id, function: { name } }) => field({ name: id, label: `What ${name} answers`, type: 'textarea', rows: 2, required: true, class: 'mono' }));
    const entry = form({
      fields, action: 'Send the results',
      submit: async (values) => {
        entry.remove();
        this.messages.push(...calls.map(({ id }) => ({ role: 'tool', tool_call_id: id, content: values[id] })));
        await this.#answer(call);
      },
    });
    this.#asked = entry;
    this.transcript.append(entry);
    this.#follow(true);
  }

  #follow(always = false) {
    const { scrollTop, clientHeight, scrollHeight } = this.transcript;
    if (always || scrollHeight - scrollTop - clientHeight < 120) this.transcript.scrollTop = scrollHeight;
  }
}
