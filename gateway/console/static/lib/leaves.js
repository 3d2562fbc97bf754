// JSON as lines for people: where a value is, and the value in words.

import { decimal } from './format.js';

/** [['limits › requests per minute', '60'], …] of {limits: {requests_per_minute: 60}}; what is empty is a line too. */
export function leaves(value, place = []) {
  if (!nests(value)) return [[place.join(' › '), said(value)]];
  const name = (key) => (Array.isArray(value) ? String(Number(key) + 1) : key.replaceAll('_', ' '));
  return Object.entries(value).flatMap(([key, inner]) => leaves(inner, [...place, name(key)]));
}

/** Whether it has lines of its own: lists of words and numbers are one. */
function nests(value) {
  if (value === null || typeof value !== 'object') return false;
  const inner = Object.values(value);
  return inner.length > 0 && !(Array.isArray(value) && inner.every((each) => each === null || typeof each !== 'object'));
}

function said(value) {
  if (Array.isArray(value)) return value.map(said).join(', ') || 'none';
  if (value === null || typeof value === 'object' || value === '') return 'none';
  if (typeof value === 'boolean') return value ? 'yes' : 'no';
  return typeof value === 'number' ? decimal(value) : value;
}
