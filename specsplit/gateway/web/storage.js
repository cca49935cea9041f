// What the page remembers: in this tab, and only until it is closed.

const PREFIX = "specsplit.";

/** Return what was remembered under `name`, or `otherwise`. */
export function recall(name, otherwise) {
  try {
    const text = sessionStorage.getItem(PREFIX + name);
    return text === null ? otherwise : JSON.parse(text);
  } catch {
    return otherwise; // storage is switched off, or holds what another version wrote
  }
}

/** Remember `value` for this tab; return whether there was room for it. */
export function remember(name, value) {
  try {
    sessionStorage.setItem(PREFIX + name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}
