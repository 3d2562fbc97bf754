// Machines, their GPUs and models as they are now: where each model is, its queue, its KV and its rate.

import { h, put } from '../../lib/dom.js';
import { compact, decimal, duration, number, percent, shortModel } from '../../lib/format.js';
import { emptyBox, statCard } from '../../lib/page.js';
import { greatest, meter, plot } from '../../lib/plot.js';
import { table } from '../../lib/table.js';

const OPERATOR = '/client/v4/operator';
const EVERY_S = 2;
const MOMENTS = 90; // of the rate, while the page is open
const PLACES = { DEVICE: 'device', MEMORY: 'memory', DISK: 'disk' };

export function show(page) {
  const totals = h('div', { class: 'grid' });
  const rates = h('section', { class: 'card' }, h('h2', {}, 'Tokens a second by model'), h('p', { class: 'muted' }, 'Drawn from the second look on.'));
  const models = h('section', { class: 'card flush' });
  const machines = h('div', { class: 'stack' });
  const known = new Map(); // the machines that are shown, by address
  const drawMachines = (found) => {
    for (const machine of found) {
      if (!known.has(machine.address)) known.set(machine.address, machineCard(machine));
      known.get(machine.address).update(machine);
    }
    const cards = found.map(({ address }) => known.get(address).element);
    if (cards.length !== machines.children.length || cards.some((card, i) => machines.children[i] !== card)) put(machines, cards);
  };
  page.append(h('p', { class: 'lead' }, `As this gateway sees it now, looked at every ${EVERY_S} seconds while this page is seen.`), totals, rates, models, machines);
  const moments = [];
  let list = null;
  const reload = page.load(models, async (signal) => {
    const [running, found] = await Promise.all([page.api.get(`${OPERATOR}/models`, { signal }), page.api.get(`${OPERATOR}/machines`, { signal })]);
    moments.push({ at: Date.now(), rates: new Map(running.map((model) => [model.model, model.tokens_per_s])) });
    moments.splice(0, moments.length - MOMENTS);
    put(totals, cards(running, found.machines));
    drawRates(rates, moments);
    drawMachines(found.machines);
    if (list) return void list.update(running);
    list = modelTable(running);
    return list.element;
  });
  page.every(EVERY_S, () => reload({ quietly: true }));
}


function cards(models, machines) {
  const sum = (key) => models.reduce((total, model) => total + model[key], 0);
  const away = machines.filter(({ problem }) => problem).length;
  return [
    statCard('Tokens a second', compact(Math.round(sum('tokens_per_s'))), 'of prompts and answers'),
    statCard('Running', number(sum('running')), `${number(sum('waiting'))} wait their turn`),
    statCard('Waiting for a model', number(sum('waiting_here')), 'that is not on a device'),
    statCard('Replicas', `${number(sum('on_device'))} of ${number(sum('replicas'))}`, 'are on a device'),
    statCard('Machines', number(machines.length), away ? `${number(away)} cannot be reached` : 'all can be reached'),
  ];
}

/** The plot is drawn anew unless somebody is looking at one of its places. */
function drawRates(place, moments) {
  if (place.contains(document.activeElement) || place.querySelector('.plot-tip:not(:empty)') || place.querySelector('details[open]')) return;
  if (moments.length < 2) return;
  const names = [...new Set(moments.flatMap(({ rates }) => [...rates.keys()]))];
  const now = moments.at(-1).at;
  const series = names.map((name) => ({ name: shortModel(name), values: moments.map(({ rates }) => rates.get(name) ?? null) }));
  const title = 'Tokens a second by model, since this page was opened';
  put(place, h('h2', {}, title), plot({
    title, unit: 'tokens/s', kind: 'lines', labels: moments.map(({ at }) => at), series: greatest(series), format: (value) => compact(Math.round(value)),
    short: (at) => `−${Math.round((now - at) / 1000)} s`, full: (at) => new Date(at).toLocaleTimeString('en-GB'),
  }));
}

function modelTable(models) {
  return table({
    caption: 'Models', captionShown: true, rows: models, search: models.length > 10 ? (model) => model.model : null,
    empty: emptyBox('No machine has told of a model yet.', 'Start `hearth machine`, or look at Alerts and store for what is wrong.'),
    columns: [
      { title: 'Model', header: true, sort: (model) => model.model, cell: (model) => [h('span', { class: 'mono' }, model.model), problems(model)] },
      { title: 'Where', cell: where },
      { title: 'Running', numeric: true, sort: (model) => model.running, cell: (model) => [number(model.running), also(model.background, 'of batches')] },
      { title: 'Queued', numeric: true, sort: (model) => model.waiting + model.waiting_here, cell: (model) => [number(model.waiting), also(model.waiting_here, 'wait for it to wake')] },
      { title: 'Tokens/s', numeric: true, sort: (model) => model.tokens_per_s, cell: (model) => compact(Math.round(model.tokens_per_s)) },
      { title: 'Cache hits', numeric: true, sort: (model) => model.hit_ratio ?? -1, cell: (model) => (model.hit_ratio === null ? '–' : [percent(model.hit_ratio), hitsBelow(model)]) },
      { title: 'KV in use', cell: (model) => kv(model, model.model) },
    ],
  });
}

const also = (count, words) => (count ? h('small', { class: 'under' }, `${number(count)} ${words}`) : null);
const problems = (model) => model.problems.map((each) => h('small', { class: 'under bad-text' }, each));

function where(model) {
  const chips = [[model.on_device, 'on device', 'good'], [model.in_memory, 'in memory', 'warn'], [model.on_disk, 'on disk', ''], [model.moving, 'moving', 'warn'], [model.quarantined, 'quarantined', 'bad']]
    .filter(([count]) => count).map(([count, words, level]) => h('span', { class: `chip ${level}` }, `${number(count)} ${words}`));
  if (model.on_device || model.ready_in_ms === 0) return chips;
  return [chips, h('small', { class: 'under' }, model.ready_in_ms === null ? 'nobody can tell when it is ready' : `ready in ${decimal(model.ready_in_ms / 1000)} s once it is asked for`)];
}

function kv(load, name) {
  if (!load?.blocks) return '–';
  const used = load.blocks - load.free_blocks;
  return [h('span', {}, `${percent(used / load.blocks)} of ${compact(load.blocks)} blocks`), meter({ value: used, most: load.blocks, label: `KV blocks in use of ${name}`, level: used > 0.97 * load.blocks ? 'warn' : 'good' }),
    tier(load.host_tier, 'in host memory', name), tier(load.disk_tier, 'on disk', name)];
}

/** What lies below the pool; full is as it should be there. */
function tier(load, where, name) {
  if (!load) return null;
  if (!load.room_bytes) return h('small', { class: 'under bad-text' }, `no room ${where}`);
  return [h('small', { class: 'under' }, `${bytes(load.held_bytes)} of ${bytes(load.room_bytes)} ${where}`), meter({ value: load.held_bytes, most: load.room_bytes, label: `KV ${where} of ${name}`, level: 'good' })];
}

/** Of which hits the KV was not on the device; what came from disk came by way of host memory. */
function hitsBelow({ host_hit_ratio: host, disk_hit_ratio: disk }) {
  const parts = [[host - disk, 'from host memory'], [disk, 'from disk']].filter(([ratio]) => ratio > 0);
  return parts.map(([ratio, words]) => h('small', { class: 'under' }, `${percent(ratio)} ${words}`));
}

const UNITS = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];

export function bytes(value) {
  const power = value > 0 ? Math.min(UNITS.length - 1, Math.floor(Math.log2(value) / 10)) : 0;
  return `${decimal(Number((value / 1024 ** power).toPrecision(3)))} ${UNITS[power]}`;
}

/** A card that stays while its machine does, so that nobody's place in it is lost. */
function machineCard({ name, address }) {
  const problem = h('div');
  const meters = h('div', { class: 'grid meters' });
  const moved = h('p', { class: 'muted' });
  const list = replicaTable(`Replicas of ${name || address}`);
  const element = h('section', { class: 'card', 'aria-label': name || address },
    h('h2', {}, name || 'A machine', ' ', h('small', { class: 'mono' }, address)), problem, meters, moved, list.element);
  return {
    element,
    update(machine) {
      put(problem, machine.problem ? h('p', { class: 'problem' }, `${machine.problem}; below is what it said last.`) : null);
      put(meters, memories(machine));
      put(moved, moves(machine.moves));
      list.update(machine.replicas);
    },
  };
}

function memories({ devices, memory_bytes: held, memory_budget_bytes: budget }) {
  const all = devices.map((device, i) => [`${i} ${device.name}`, device.held_bytes, device.budget_bytes]);
  if (budget) all.push(['Host memory', held, budget]);
  return all.map(([name, value, most]) => h('div', {}, h('strong', {}, name), h('div', { class: 'muted' }, `${bytes(value)} of ${bytes(most)}`),
    meter({ value, most, label: `Memory held of ${name}`, level: value > 0.98 * most ? 'warn' : 'good' })));
}

function moves(counts) {
  const said = Object.entries(counts).filter(([, count]) => count).map(([kind, count]) => `${kind.replace('_', ' ')} ${number(count)}`);
  return `Moves since its start: ${said.join(', ') || 'none'}.`;
}

function replicaTable(caption) {
  const of = (title, value) => ({ title, numeric: true, cell: (replica) => (replica.load ? value(replica.load) : '–') });
  return table({
    caption, rows: [], empty: emptyBox('It has no models.'),
    columns: [
      { title: 'Model', header: true, cell: (replica) => [h('span', { class: 'mono' }, replica.model), replica.problem ? h('small', { class: 'under bad-text' }, replica.problem) : null] },
      { title: 'Weights', cell: (replica) => [place(replica), replica.device_bytes ? h('small', { class: 'under' }, `${bytes(replica.device_bytes)} on ${replica.device === null ? 'it' : (replica.devices || []).length > 1 ? `each of devices ${replica.devices.join(', ')}` : `device ${replica.device}`}`) : null] },
      of('Running', (load) => number(load.running)), of('Queued', (load) => number(load.waiting)), of('Tokens/s', (load) => compact(Math.round(load.tokens_per_s))),
      of('Cache hits', (load) => (load.hit_ratio === null ? '–' : [percent(load.hit_ratio), hitsBelow(load)])),
      { title: 'KV in use', cell: (replica) => kv(replica.load, replica.model) },
    ],
  });
}

function place(replica) {
  const level = replica.quarantined ? 'bad' : replica.residency === 'DEVICE' ? 'good' : replica.residency === 'MEMORY' ? 'warn' : '';
  const going = replica.toward === replica.residency ? '' : ` → ${PLACES[replica.toward]}`;
  const words = replica.quarantined ? 'quarantined' : `${PLACES[replica.residency]}${going}`;
  return [h('span', { class: `chip ${level}` }, words), replica.ready_ms > 0 ? h('small', { class: 'under' }, `ready in ${duration(replica.ready_ms / 1000)}`) : null];
}
