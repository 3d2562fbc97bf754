// One answer of a model as it streams: its text, thoughts and calls of tools, and what it took and cost.

import { ApiProblem } from './api.js';
import { h, put } from './dom.js';
import { decimal, number } from './format.js';
import { problemBox } from './page.js';

const ENDS = {
  length: 'cut at its most tokens',
  quota: 'cut: a budget of neurons is used up',
  tool_calls: 'calls tools',
  content_filter: 'cut by a filter',
};

/**
 * Streams a chat completion into a message. Returns `{element, done}`; `done` becomes `{text, calls, failed}` once it
 * has ended, and never fails: what goes wrong is said in the message.
 */
export function answer({ page, model, body, query = {}, signal, onText = () => {} }) {
  const text = h('div', { class: 'message-text' });
  const extra = h('div');
  const figures = h('div', { class: 'figures' });
  const element = h('div', { class: 'message assistant live' }, h('span', { class: 'message-who' }, model.name), extra, text, figures);
  const state = { text: '', thought: '', calls: [], finish: '', usage: null, beganMs: performance.now(), firstMs: null, lastMs: null };

  async function run() {
    try {
      const sent = { ...body, model: model.name, stream: true, stream_options: { include_usage: true, include_obfuscation: false } };
      for await (const chunk of page.api.stream('/v1/chat/completions', { query, body: sent, signal })) {
        take(state, chunk);
        draw();
        onText();
      }
      draw(true);
      return { text: state.text, calls: state.calls, failed: false };
    } catch (error) {
      const stopped = error.name === 'AbortError';
      if (!stopped && !(error instanceof ApiProblem)) console.error(error);
      draw(true);
      add(stopped ? h('p', { class: 'muted' }, 'Stopped. What came until then is charged.') : problemBox(error));
      return { text: state.text, calls: [], failed: !stopped || !state.text };
    } finally {
      element.classList.remove('live');
    }
  }

  function draw(ended = false) {
    if (text.textContent !== state.text) text.textContent = state.text;
    put(extra, thoughts(state.thought, ended && Boolean(state.text)), state.calls.map(call));
    put(figures, facts(state, model));
  }

  const add = (node) => element.insertBefore(node, figures);
  return { element, done: run() };
}

function take(state, chunk) {
  if (chunk.usage) state.usage = chunk.usage;
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const delta = choice.delta ?? {};
  if (delta.content || delta.reasoning_content || delta.tool_calls) {
    state.firstMs ??= performance.now() - state.beganMs;
    state.lastMs = performance.now() - state.beganMs;
  }
  state.text += delta.content ?? '';
  state.thought += delta.reasoning_content ?? '';
  for (const { index, id, function: part } of delta.tool_calls ?? []) {
    state.calls[index] ??= { id, name: '', arguments: '' };
    state.calls[index].name += part?.name ?? '';
    state.calls[index].arguments += part?.arguments ?? '';
  }
  if (choice.finish_reason) state.finish = choice.finish_reason;
}

function thoughts(thought, closed) {
  if (!thought) return null;
  const details = h('details', { class: 'thoughts' }, h('summary', {}, 'Thoughts'), h('div', { class: 'message-text' }, thought));
  details.open = !closed;
  return details;
}

const call = ({ name, arguments: text }) => h('pre', {}, h('code', {}, `${name}(${pretty(text)})`));

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // not all of it is there yet
  }
}

function facts(state, model) {
  const { usage, firstMs, lastMs } = state;
  const found = [];
  const fact = (value, words) => found.push(h('span', {}, h('b', {}, value), ` ${words}`));
  if (firstMs !== null) fact(`${number(firstMs)} ms`, 'to the first token');
  if (usage) {
    if (usage.completion_tokens > 1 && lastMs > firstMs) fact(decimal((1000 * (usage.completion_tokens - 1)) / (lastMs - firstMs)), 'tokens/s');
    fact(number(usage.prompt_tokens), 'in');
    fact(number(usage.prompt_tokens_details?.cached_tokens ?? 0), 'of them cached');
    fact(number(usage.completion_tokens), 'out');
    if (usage.neurons !== undefined) {
      const dollars = model.neuronUsd ? `, $${decimal(1000 * usage.neurons * model.neuronUsd)} for 1,000 such calls` : '';
      fact(decimal(usage.neurons), `neurons${dollars}`);
    }
  }
  if (ENDS[state.finish]) fact('', ENDS[state.finish]);
  return found;
}
