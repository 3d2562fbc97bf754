// Light, dark, or as the system is: the one choice that is kept between visits.

const KEY = 'hearth.theme';
export const THEMES = ['auto', 'light', 'dark'];

export function theme() {
  const kept = localStorage.getItem(KEY);
  return THEMES.includes(kept) ? kept : 'auto';
}

/** Draws the page in a theme, and keeps it. */
export function applyTheme(chosen = theme()) {
  if (chosen !== theme()) localStorage.setItem(KEY, chosen);
  document.documentElement.dataset.theme = chosen;
}
