// Dark or light: the system's choice until the user makes one.

import { byId } from "./dom.js";
import { recall, remember } from "./storage.js";

const THEMES = ["auto", "light", "dark"];
const SIGNS = { auto: "◐", light: "☀", dark: "☾" };

/** Let the button go through the themes. */
export function setUpTheme() {
  const toggle = byId("theme");
  let theme = recall("theme", "auto");
  const show = () => {
    document.documentElement.dataset.theme = theme;
    toggle.textContent = SIGNS[theme];
    toggle.setAttribute("aria-label", `Theme: ${theme}`);
    toggle.title = `Theme: ${theme}`;
  };
  toggle.addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    remember("theme", theme);
    show();
  });
  show();
}
