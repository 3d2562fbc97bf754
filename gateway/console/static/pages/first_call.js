// The first call: a snippet to paste with the real address and model, and the same call made from here.

import { answer } from '../lib/answer.js';
import { codeBlock } from '../lib/dialog.js';
import { button, h, put } from '../lib/dom.js';
import { field } from '../lib/form.js';
import { TEXT, models } from '../lib/models.js';
import { emptyBox } from '../lib/page.js';
import { firstBody, snippets, withToken } from '../lib/snippets.js';
import { tabs } from '../lib/tabs.js';

export function show(page) {
  const place = h('div', { class: 'steps' });
  page.append(
    h('p', { class: 'lead' }, 'Hearth speaks OpenAI’s, Anthropic’s and Workers AI’s interfaces: their SDKs need this address and a token, and nothing else.'),
    place,
  );
  page.load(place, async (signal) => {
    const known = await models(page, { signal });
    if (!known.length) return emptyBox('No model may be called with this token.', 'Ask whoever gave it to you for others.');
    return steps(page, known);
  });
}

function steps(page, known) {
  const choice = field({ name: 'model', label: 'Model', type: 'select', options: known.map(({ name, task }) => [name, task === TEXT ? name : `${name} (${task})`]), value: known[0].name });
  const filled = field({ name: 'filled', label: 'Copy with my token in it', type: 'check' });
  const calls = h('div');
  const here = h('section', { class: 'card' });
  const draw = () => {
    const model = known.find(({ name }) => name === choice.control.value);
    put(calls, examples(page, model, filled.control));
    put(here, h('h2', {}, 'Or make it here'), tryOut(page, model));
  };
  choice.control.addEventListener('change', draw);
  draw();
  return [
    h('section', { class: 'card' },
      h('h2', {}, 'Keep your token where programs find it'),
      codeBlock('read -rs TOKEN && export TOKEN    # paste the token; it is not shown', { label: 'Shell', copied: () => 'read -rs TOKEN && export TOKEN' }),
    ),
    h('section', { class: 'card' },
      h('h2', {}, 'Paste a call'),
      h('div', { class: 'toolbar' }, choice.element, filled.element),
      calls,
    ),
    here,
    h('p', { class: 'muted' }, 'Then: ', h('a', { href: '#/playground' }, 'the playground'), ' to try prompts, ', h('a', { href: '/docs' }, 'the API’s description'), ' for every field.'),
  ];
}

function examples(page, model, filled) {
  const made = snippets({ base: location.origin, model: model.name, task: model.task });
  const copied = (code) => () => (filled.checked ? withToken(code, page.session.token) : code);
  return tabs({ label: 'Languages', tabs: made.map(([title, code]) => ({ title, panel: () => codeBlock(code, { label: title, copied: copied(code) }) })) });
}

function tryOut(page, model) {
  if (model.task !== TEXT) return h('p', { class: 'muted' }, 'A model that writes text can be tried here; this one takes calls from programs.');
  const place = h('div', { class: 'answer', 'aria-live': 'polite' });
  const body = firstBody(model.name);
  const run = button('Run it', async () => {
    run.disabled = true;
    const streamed = answer({ page, model, body, signal: page.signal });
    put(place, streamed.element);
    await streamed.done;
    run.disabled = false;
    put(run, 'Run it again');
  }, { kind: 'primary' });
  return [
    h('p', { class: 'muted' }, `“${body.messages[1].content}” The second time, the answer says how much of the prompt was already in the cache.`),
    h('div', { class: 'row' }, run),
    place,
  ];
}
