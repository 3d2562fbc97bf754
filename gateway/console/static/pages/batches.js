// The team's batches: queued, followed, cancelled, and their results read.

import { codeBlock, confirmed, notify, openDialog } from '../lib/dialog.js';
import { button, h } from '../lib/dom.js';
import { download } from '../lib/download.js';
import { FieldProblem, field, form } from '../lib/form.js';
import { compact, number, relative, time } from '../lib/format.js';
import { icon } from '../lib/icons.js';
import { TEXT, models } from '../lib/models.js';
import { emptyBox } from '../lib/page.js';
import { meter } from '../lib/plot.js';
import { table } from '../lib/table.js';

const REFRESH_S = 5;
const SHOWN_BYTES = 20_000;
const LEVELS = { queued: '', running: 'warn', done: 'good', cancelled: '', failed: 'bad' };

export function show(page) {
  const place = h('section', { class: 'card flush' });
  page.main.querySelector('.page-head').append(button([icon('add'), 'New batch'], () => create(page, reload), { kind: 'primary' }));
  page.append(
    h('p', { class: 'lead' }, 'Many requests for one model, run on what live calls leave free, at half the price. Results are kept for a day after the end.'),
    place,
  );
  let list = null;
  const reload = page.load(place, async (signal) => {
    const batches = await page.api.get('/ai/batches', { signal });
    if (list?.element.isConnected) return void list.update(batches);
    list = batchTable(page, batches, () => reload());
    return list.element;
  });
  page.every(REFRESH_S, () => reload({ quietly: true }));
}

function batchTable(page, batches, reload) {
  return table({
    caption: 'Batches', rows: batches, empty: emptyBox('No batches.', 'A batch is sent from a program with queueRequest=true, or made here.'),
    columns: [
      { title: 'Batch', header: true, cell: (batch) => [h('span', { class: 'mono' }, batch.request_id), h('small', { class: 'under' }, batch.model)] },
      { title: 'State', cell: (batch) => h('span', { class: `chip ${LEVELS[batch.status] ?? ''}` }, batch.status) },
      { title: 'Requests', cell: (batch) => progress(batch.requests) },
      { title: 'Tokens', numeric: true, sort: (batch) => batch.usage.total_tokens, cell: (batch) => compact(batch.usage.total_tokens) },
      { title: 'Sent', sort: (batch) => batch.created_at, cell: (batch) => h('span', { title: time(batch.created_at) }, relative(batch.created_at)) },
      { title: 'Deleted', cell: (batch) => h('span', { title: time(batch.expires_at) }, relative(batch.expires_at)) },
      { title: 'Actions', hidden: true, cell: (batch) => actions(page, batch, reload) },
    ],
  });
}

function progress({ total, succeeded, failed }) {
  const words = `${number(succeeded)} of ${number(total)}${failed ? `, ${number(failed)} failed` : ''}`;
  return [meter({ value: succeeded + failed, most: total, level: failed ? 'warn' : 'good', label: words }), h('small', {}, words)];
}

function actions(page, batch, reload) {
  const open = batch.status === 'queued' || batch.status === 'running';
  const label = (what) => ({ 'aria-label': `${what} of batch ${batch.request_id}` });
  return open
    ? button('Cancel', () => cancel(page, batch, reload), { kind: 'small danger', ...label('Cancel the rest') })
    : button('Results', () => results(page, batch), { kind: 'small', ...label('Results') });
}

const runPath = (model) => `/ai/run/${model.split('/').map(encodeURIComponent).join('/')}`;

async function cancel(page, batch, reload) {
  const text = 'What is done is kept. What runs ends within two seconds, and is charged as far as it came.';
  if (!(await confirmed({ title: 'Cancel this batch?', text, action: 'Cancel it' }))) return;
  try {
    await page.api.call('DELETE', `/ai/batches/${encodeURIComponent(batch.request_id)}`);
  } catch (problem) {
    notify(problem.message);
  }
  reload();
}

function results(page, batch) {
  const place = h('div');
  openDialog({ title: 'Results', body: place, wide: true });
  page.load(place, async (signal) => {
    const { result } = await page.api.call('POST', runPath(batch.model), { body: { request_id: batch.request_id }, signal });
    const text = JSON.stringify(result, null, 2);
    const cut = text.length > SHOWN_BYTES;
    return [
      h('div', { class: 'row spread' }, h('p', { class: 'muted' }, `${number(result.responses.length)} results`),
        button([icon('down'), 'Download'], () => download(`batch-${batch.request_id}.json`, text, 'application/json'), { kind: 'small' })),
      result.responses.length ? responses(result.responses) : null,
      h('details', { class: 'help' }, h('summary', {}, 'As JSON'), codeBlock(cut ? `${text.slice(0, SHOWN_BYTES)}\n…` : text, { label: 'Results as JSON', copied: () => text })),
    ];
  });
}

function responses(items) {
  return table({
    caption: 'Results', rows: items,
    columns: [
      { title: 'Request', header: true, sort: (item) => item.id, cell: (item) => [number(item.id), item.external_reference ? h('small', { class: 'under' }, item.external_reference) : null] },
      { title: 'Answer', cell: (item) => (item.success ? answerText(item.result) : h('span', { class: 'field-problem' }, item.errors?.[0]?.message ?? 'It failed.')) },
    ],
  }).element;
}

function answerText(result) {
  const answer = result.response ?? result.choices?.[0]?.message?.content ?? result;
  return h('span', { class: 'message-text' }, typeof answer === 'string' ? answer : JSON.stringify(answer));
}

async function create(page, reload) {
  let known = [];
  try {
    known = await models(page);
  } catch (problem) {
    return notify(problem.message);
  }
  const writers = known.filter(({ task }) => task === TEXT);
  const prompts = field({ name: 'prompts', label: 'Prompts', type: 'textarea', rows: 8, required: true, hint: 'One a line; a line that is a JSON object is a whole request, as /ai/run takes it.' });
  const entry = form({
    label: 'New batch',
    fields: [
      field({ name: 'model', label: 'Model', type: 'select', options: writers.map(({ name }) => [name, name]), value: writers[0]?.name ?? '', required: true }),
      prompts,
    ],
    action: 'Queue it',
    cancel: () => close(),
    submit: async ({ model, prompts: text }) => {
      const requests = text.split('\n').filter((line) => line.trim()).map((line, i) => requestOf(line, i, prompts));
      await page.api.call('POST', runPath(model), { query: { queueRequest: 'true' }, body: { requests } });
      close();
      notify(`${number(requests.length)} requests are queued.`);
      reload();
    },
  });
  const close = openDialog({ title: 'New batch', body: entry });
}

function requestOf(line, i, place) {
  if (!line.trim().startsWith('{')) return { prompt: line.trim() };
  try {
    return JSON.parse(line);
  } catch (error) {
    place.fail(`Line ${i + 1} is no JSON: ${error.message}`);
    throw new FieldProblem(error.message);
  }
}
