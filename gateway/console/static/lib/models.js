// The models that the token may call, as the pages need them: read once a session, again where a page asks for that.

const TASKS = { text: 'Text Generation', vectors: 'Text Embeddings', scores: 'Text Classification' };
export const TEXT = TASKS.text;

const known = new WeakMap();

/** The models, those that write text first. A model is `{name, description, task, prices, context, …}`. */
export async function models(page, { anew = false, signal = page.signal } = {}) {
  const identity = page.session.identity;
  if (anew || !known.has(identity)) {
    const [items, offers] = await Promise.all([
      page.api.all('/ai/models/search', { perPage: 1000, signal }),
      page.api.get('/ai/models/search', { query: { format: 'openrouter', per_page: 1000 }, signal }),
    ]);
    const dollars = new Map((offers.data ?? []).map((offer) => [offer.id, offer.pricing]));
    known.set(identity, items.map((item) => model(item, dollars.get(item.name))).sort(byTask));
  }
  return known.get(identity);
}

function model(item, dollars) {
  const property = Object.fromEntries(item.properties.map(({ property_id: id, value }) => [id, value]));
  const price = (word) => property.price?.find(({ unit }) => unit === `per M ${word} tokens`)?.price ?? null;
  const prices = { input: price('input'), cached: price('cached input'), output: price('output') };
  const usd = Number(dollars?.prompt ?? 0);
  return {
    id: item.id,
    name: item.name,
    description: item.description,
    task: item.task.name,
    prices,
    neuronUsd: prices.input ? (usd * 1e6) / prices.input : 0,
    context: Number(property.context_window ?? 0),
    inputMax: Number(property.max_input_tokens ?? 0),
    dimensions: Number(property.output_dimensions ?? 0),
    tools: property.function_calling === 'true',
    reasoning: property.reasoning === 'true',
    beta: property.beta === 'true',
    ends: property.planned_deprecation_date ?? '',
    terms: property.terms ?? '',
    info: property.info ?? '',
    tags: item.tags ?? [],
  };
}

const order = Object.values(TASKS);
const byTask = (one, other) => order.indexOf(one.task) - order.indexOf(other.task) || one.name.localeCompare(other.name);
