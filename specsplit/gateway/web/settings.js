// The settings beside the conversation, and the request that they make of a prompt.

import { byId } from "./dom.js";
import { recall, remember } from "./storage.js";

const PATHS = { chat: "v1/chat/completions", completion: "v1/completions" };
const SAMPLING = ["temperature", "top_p", "top_k", "max_tokens"];

export class Settings {
  /** `onKey` is called when the key has changed. */
  constructor(onKey) {
    this.form = byId("settings-form");
    this.toggle = byId("settings-toggle");
    this.panel = byId("settings");
    for (const [name, value] of Object.entries(recall("settings", {}))) {
      const field = this.form.elements.namedItem(name);
      if (field !== null) field.value = value;
    }
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.addEventListener("change", (event) => {
      this.#remember();
      if (event.target.name === "key") onKey();
    });
    this.toggle.addEventListener("click", () => this.show(this.panel.hidden));
    byId("settings-close").addEventListener("click", () => {
      this.show(false);
      this.toggle.focus();
    });
    this.#showWhatApplies();
  }

  get key() {
    return this.form.elements.key.value.trim();
  }

  set endpoint(endpoint) {
    this.form.elements.endpoint.value = endpoint;
    this.#remember();
  }

  show(isShown) {
    this.panel.hidden = !isShown;
    this.toggle.setAttribute("aria-expanded", String(isShown));
  }

  /** Open the panel at the field for the key. */
  askForKey() {
    this.show(true);
    this.form.elements.key.focus();
  }

  /** Return the request for `prompt` after `turns`; without a seed of the user's it has a new one. */
  request(prompt, turns, model) {
    const values = Object.fromEntries(new FormData(this.form));
    const { endpoint } = values;
    const body = { ...(model ? { model } : {}), stream: true };
    for (const name of SAMPLING) {
      if (values[name] !== "") body[name] = Number(values[name]);
    }
    body.seed = values.seed === "" ? crypto.getRandomValues(new Uint32Array(1))[0] : Number(values.seed);
    body.speculative = values.mode ? { mode: values.mode } : {};
    if (endpoint === "chat") body.messages = messages(values.system, turns, prompt);
    else body.prompt = prompt;
    return { endpoint, path: PATHS[endpoint], body };
  }

  #remember() {
    remember("settings", Object.fromEntries(new FormData(this.form)));
    this.#showWhatApplies();
  }

  #showWhatApplies() {
    for (const row of this.form.querySelectorAll("[data-only]")) {
      row.hidden = row.dataset.only !== this.form.elements.endpoint.value;
    }
  }
}

function messages(system, turns, prompt) {
  const said = system.trim() ? [{ role: "system", content: system }] : [];
  for (const turn of turns.filter((each) => each.isPartOfConversation)) {
    said.push({ role: "user", content: turn.prompt }, { role: "assistant", content: turn.answers[0].text });
  }
  return [...said, { role: "user", content: prompt }];
}
