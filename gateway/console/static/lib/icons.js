// The console's few pictures, as strokes in a box of 20 by 20. All of them are for show: words stand beside them.

import { svg } from './dom.js';

const PATHS = {
  start: 'M4 10h12M11 5l5 5-5 5',
  playground: 'M3 5h14v9H9l-4 3v-3H3z',
  models: 'M10 2.500l6.500 3.700v7.600L10 17.500l-6.500-3.700V6.200zM3.500 6.200L10 10l6.500-3.800M10 10v7.500',
  usage: 'M3 17h14M5.500 17V9.500M10 17V4M14.500 17v-5',
  limits: 'M3.500 14a7 7 0 1 1 13 0M10 12.500l3-5',
  tokens: 'M7 13a3.500 3.500 0 1 1 2.900-5.400H17v3h-2v2h-3v-2h-1.600A3.500 3.500 0 0 1 7 13z',
  batches: 'M3 6l7-3 7 3-7 3zM3 10l7 3 7-3M3 14l7 3 7-3',
  accounts: 'M7 9a2.500 2.500 0 1 0 0-5 2.500 2.500 0 0 0 0 5zM2.500 16c.3-3 2-4.500 4.500-4.500s4.200 1.500 4.500 4.500M13 9.500a2 2 0 1 0-.5-4M14 12c2 .2 3.300 1.500 3.500 4',
  plans: 'M4 3h9l3 3v11H4zM7 8h6M7 11h6M7 14h4',
  machines: 'M3 4h14v5H3zM3 11h14v5H3zM6 6.500h.01M6 13.500h.01',
  live: 'M2.500 10h3.500l2-5 4 10 2-5h3.500',
  audit: 'M5 3h10v14H5zM8 7h4M8 10h4M8 13h2',
  alerts: 'M10 3a4.500 4.500 0 0 1 4.500 4.500c0 4 1.500 5 1.500 5H4s1.500-1 1.500-5A4.500 4.500 0 0 1 10 3zM8.500 15.500a1.500 1.500 0 0 0 3 0',
  menu: 'M3 5.500h14M3 10h14M3 14.500h14',
  close: 'M5 5l10 10M15 5L5 15',
  copy: 'M7 7h9v10H7zM4 13V3h9',
  done: 'M4 10.500l4 4 8-9',
  leave: 'M8 3H4v14h4M12 6l4 4-4 4M16 10H8',
  stop: 'M5.500 5.500h9v9h-9z',
  add: 'M10 4v12M4 10h12',
  down: 'M10 3v10M6 9.500l4 4 4-4M4 17h12',
};

export function icon(name) {
  const path = svg('path', { d: PATHS[name] ?? PATHS.live });
  return svg('svg', { class: 'icon', viewBox: '0 0 20 20', 'aria-hidden': 'true', focusable: 'false' }, path);
}

/** Hearth's flame. */
export function flame() {
  return svg(
    'svg',
    { class: 'flame', viewBox: '0 0 32 32', 'aria-hidden': 'true', focusable: 'false' },
    svg('path', { class: 'flame-outer', d: 'M17 2c1 6-7 9-7 17a7.500 7.500 0 0 0 15 1c0-4-2-6-3-9-1 2-2 3-3.500 3.500C20 10 20 5 17 2z' }),
    svg('path', {
      class: 'flame-inner',
      d: 'M16.500 17c.5 3-3 4-3 7.200a3.800 3.800 0 0 0 7.600.3c0-2-1.200-3-1.600-4.500-.6 1-1 1.300-1.700 1.500.3-1.700 0-3.400-1.300-4.500z',
    }),
  );
}
