// The limits that accounts and tokens have: their names for people, and fields for them.

import { field } from './form.js';

export const LIMITS = {
  requests_per_minute: ['Requests a minute', 1],
  concurrent_requests: ['Requests at once', 1],
  input_tokens_per_minute: ['Input tokens a minute', 1],
  output_tokens_per_minute: ['Output tokens a minute', 1],
  neurons_per_day: ['Neurons a day', 'any'],
  neurons_per_month: ['Neurons a month', 'any'],
};

export const limitName = (key) => LIMITS[key]?.[0] ?? key.replaceAll('_', ' ');

/** A field for each limit; one that is left empty sets none. `limits` are those of now. */
export function limitFields(limits = {}) {
  return Object.entries(LIMITS).map(([name, [label, step]]) =>
    field({ name, label, type: 'number', value: limits[name] ?? '', min: step === 'any' ? 0 : 1, step, placeholder: 'no limit', inputmode: 'decimal' }));
}

/** The limits that the fields say; what has no field, as classes of models, stays as it was. */
export function limitsOf(values, before = {}) {
  const limits = { ...before };
  for (const name of Object.keys(LIMITS)) {
    if (values[name] === null) delete limits[name];
    else limits[name] = values[name];
  }
  if (!('requests_per_minute' in limits)) delete limits.burst;
  return limits;
}
