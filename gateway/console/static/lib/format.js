// Numbers, times and names as people read them. Days of usage are days in UTC; instants are shown in local time.

import { clockAheadMs, gatewayNow } from './clock.js';

const whole = new Intl.NumberFormat('en', { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat('en', { notation: 'compact', maximumSignificantDigits: 3 });
const instant = new Intl.DateTimeFormat('en-GB', { dateStyle: 'medium', timeStyle: 'short' });
const calendar = new Intl.DateTimeFormat('en-GB', { dateStyle: 'medium' });
const dayName = new Intl.DateTimeFormat('en-GB', { day: 'numeric', month: 'short', timeZone: 'UTC' });
const longDay = new Intl.DateTimeFormat('en-GB', { weekday: 'short', day: 'numeric', month: 'long', timeZone: 'UTC' });

/** 12,345 */
export const number = (value) => whole.format(value);

/** 12.3K */
export const compact = (value) => (Math.abs(value) < 1000 ? decimal(value) : short.format(value));

/** A number with as many digits as say something. */
export function decimal(value) {
  if (value === 0 || Number.isInteger(value)) return whole.format(value);
  const digits = Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 1 ? 2 : 4;
  return new Intl.NumberFormat('en', { maximumFractionDigits: digits }).format(value);
}

/** About how many dollars; a sum too small for a coin is said to be that, and not nothing. */
export const dollars = (sum) => (sum > 0 && sum < 0.01 ? 'less than $0.01' : `≈ $${decimal(sum)}`);

/** A part of one, in per cent. */
export const percent = (part) => `${(100 * part).toFixed(part > 0 && part < 0.1 ? 1 : 0)}%`;

/** 23 Nov of 2026-11-23. */
export const day = (date) => dayName.format(new Date(`${date}T00:00:00Z`));

export const dayInFull = (date) => longDay.format(new Date(`${date}T00:00:00Z`));

/** The local time of an instant. */
export const time = (date) => instant.format(new Date(date));

/** The local date of an instant. */
export const date = (at) => calendar.format(new Date(at));

/** 3 h 12 min */
export function duration(seconds) {
  if (seconds < 1) return 'less than a second';
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return minutes % 60 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
  return `${Math.round(hours / 24)} days`;
}

/** in 3 h, or 3 h ago */
export function relative(date, now = gatewayNow()) {
  const seconds = (new Date(date) - now) / 1000;
  return seconds >= 0 ? `in ${duration(seconds)}` : `${duration(-seconds)} ago`;
}

/** Today's date in UTC, or that of so many days before. */
export const utcDay = (daysAgo = 0) => new Date(gatewayNow() - 86_400_000 * daysAgo).toISOString().slice(0, 10);

/** All dates from one to another, both included. */
export function days(from, to) {
  const found = [];
  for (let at = Date.parse(`${from}T00:00:00Z`); at <= Date.parse(`${to}T00:00:00Z`); at += 86_400_000) {
    found.push(new Date(at).toISOString().slice(0, 10));
  }
  return found;
}

/** What a day in UTC is on the clock of whoever looks. */
export function utcNote() {
  const midnight = new Date(gatewayNow());
  midnight.setUTCHours(24, 0, 0, 0);
  const local = new Intl.DateTimeFormat('en-GB', { hour: '2-digit', minute: '2-digit' }).format(midnight);
  const note = local === '00:00' ? 'Days are days in UTC.' : `Days are days in UTC: one ends at ${local} on your clock.`;
  const ahead = clockAheadMs();
  return ahead ? `${note} Your clock is ${duration(Math.abs(ahead) / 1000)} ${ahead > 0 ? 'fast' : 'slow'}; what is shown is by the gateway’s.` : note;
}

/** The last part of a model's name: `ember` of `@cf/hearth/ember`. */
export const shortModel = (name) => name.split('/').pop() || name;
