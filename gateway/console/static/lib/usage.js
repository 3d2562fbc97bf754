// What usage is counted by, the rows of a ledger as series of days, and the button that saves them as CSV.

import { notify } from './dialog.js';
import { button } from './dom.js';
import { download } from './download.js';

export const COUNTS = {
  neurons: 'neurons', requests: 'requests', prompt_tokens: 'input tokens', cached_tokens: 'cached input tokens', completion_tokens: 'output tokens',
};

/** The name of a count where a sentence begins. */
export const countTitle = (count) => COUNTS[count][0].toUpperCase() + COUNTS[count].slice(1);

/** Rows `{day, [key], [count], …}` as a series for each value of `key`, with a number for each of `days`. */
export function seriesByDay(rows, { days, key, count, label }) {
  const at = new Map(days.map((date, i) => [date, i]));
  const series = new Map();
  for (const row of rows) {
    if (!series.has(row[key])) series.set(row[key], { name: label(row[key]), values: days.map(() => 0) });
    series.get(row[key]).values[at.get(row.day)] += row[count];
  }
  return [...series.values()];
}

/** A button that saves usage from `path` as a file; `chosen()` is the file's name and the query of that moment. */
export function csvButton(page, path, chosen) {
  const save = async () => {
    const { name, query } = chosen();
    try {
      const { text } = await page.api.call('GET', path, { query: { ...query, format: 'csv' }, headers: { accept: 'text/csv' }, signal: page.signal });
      download(`${name}-${query.from}-${query.to}.csv`, text, 'text/csv');
    } catch (problem) {
      if (problem.name !== 'AbortError') notify(problem.message);
    }
  };
  return button('Download CSV', save, { kind: 'end' });
}
