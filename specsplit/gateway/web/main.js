// The page: joins the parts, and owns the conversation and the answer that is coming.

import { Api } from "./api.js";
import { Connection } from "./connection.js";
import { byId, element } from "./dom.js";
import { Settings } from "./settings.js";
import { recall, remember } from "./storage.js";
import { setUpTheme } from "./theme.js";
import { Turn } from "./turn.js";
import { TurnView } from "./turn_view.js";

const STATES = {
  ready: "Ready",
  unready: "The model is not ready; asking again …",
  away: "The server is away; asking again …",
  locked: "The server asks for an API key",
};
const NEAR_END_PX = 120;

class Page {
  constructor() {
    this.turns = recall("turns", []).map(Turn.from);
    this.stopping = null; // aborts the answer that is coming; null if there is none
    this.prompt = byId("prompt");
    this.send = byId("send");
    this.model = byId("model");
    this.conversation = byId("conversation");
    this.settings = new Settings(() => this.connection.check());
    this.api = new Api(() => this.settings.key);
    this.connection = new Connection(this.api, (state, models) => this.#showConnection(state, models));
  }

  start() {
    setUpTheme();
    this.#setUpSwitches();
    this.#listen();
    this.#redraw();
    if (matchMedia("(min-width: 1100px)").matches) this.settings.show(true);
    this.prompt.focus();
    this.connection.check();
  }

  #listen() {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.stopping) this.stopping.abort();
      else this.#submit();
    });
    this.prompt.addEventListener("keydown", (event) => {
      // While an input method composes a character, Enter belongs to it.
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.stopping) this.#submit();
    });
    this.prompt.addEventListener("input", () => this.#fitPrompt());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stopping?.abort();
    });
    byId("new-chat").addEventListener("click", () => {
      this.stopping?.abort();
      this.turns = [];
      this.#redraw();
      this.prompt.focus();
    });
    this.model.addEventListener("change", () => remember("model", this.model.value));
  }

  #setUpSwitches() {
    const showRejected = byId("show-rejected");
    const compare = byId("compare");
    showRejected.checked = recall("show-rejected", false);
    compare.checked = recall("compare", false);
    const show = () => document.body.classList.toggle("shows-rejected", showRejected.checked);
    showRejected.addEventListener("change", () => {
      remember("show-rejected", showRejected.checked);
      show();
    });
    compare.addEventListener("change", () => remember("compare", compare.checked));
    show();
  }

  #submit() {
    const prompt = this.prompt.value;
    if (prompt.trim() === "") return;
    this.prompt.value = "";
    this.#fitPrompt();
    this.#ask(prompt);
  }

  /** Ask again for the last turn, with the settings as they are now. */
  #retry(turn, endpoint) {
    if (this.stopping) return;
    if (endpoint) this.settings.endpoint = endpoint;
    this.turns = this.turns.filter((each) => each !== turn);
    this.#redraw();
    this.#ask(turn.prompt);
  }

  async #ask(prompt) {
    const request = this.settings.request(prompt, this.turns, this.model.value);
    const turn = new Turn({ prompt, request, isComparing: byId("compare").checked });
    const stopping = (this.stopping = new AbortController());
    this.turns.push(turn);
    const view = this.#show(turn);
    this.#showSending(true);
    view.root.scrollIntoView({ block: "end" });
    await turn.run(this.api, stopping.signal, {
      onRound: (index, round) => this.#followEnd(() => round && view.answers[index].append(round)),
      onWait: (index, sentence) => view.answers[index].wait(sentence),
    });
    if (this.stopping === stopping) this.stopping = null;
    this.#showSending(this.stopping !== null);
    this.#followEnd(() => view.finish());
    this.#rememberTurns();
    if (turn.error?.isLost || turn.error?.status === 503) this.connection.check();
    if (turn.error?.status === 401) this.settings.askForKey();
  }

  /** Do `change`, which makes the page longer, and stay at its end if the reader is there. */
  #followEnd(change) {
    const root = document.documentElement;
    const isAtEnd = root.scrollHeight - root.scrollTop - root.clientHeight < NEAR_END_PX;
    change();
    if (isAtEnd) requestAnimationFrame(() => root.scrollTo({ top: root.scrollHeight }));
  }

  #show(turn) {
    const view = new TurnView(turn, { onRetry: (each, endpoint) => this.#retry(each, endpoint) });
    this.conversation.append(view.root);
    byId("welcome").hidden = true;
    return view;
  }

  #redraw() {
    this.conversation.replaceChildren();
    for (const turn of this.turns) this.#show(turn);
    byId("welcome").hidden = this.turns.length > 0;
    this.#rememberTurns();
  }

  /** Remember the conversation; where it is too large, its oldest turns are forgotten first. */
  #rememberTurns() {
    for (let from = 0; from <= this.turns.length; from += 1) {
      if (remember("turns", this.turns.slice(from))) return;
    }
  }

  #fitPrompt() {
    this.prompt.style.height = "auto";
    this.prompt.style.height = `${this.prompt.scrollHeight}px`;
  }

  #showSending(isSending) {
    this.send.textContent = isSending ? "Stop" : "Send";
    this.send.classList.toggle("is-stop", isSending);
  }

  #showConnection(state, models) {
    const status = byId("status");
    status.dataset.state = state;
    status.textContent = STATES[state];
    if (state === "locked") this.settings.askForKey();
    if (!models.length) return;
    const chosen = recall("model", "");
    this.model.replaceChildren(...models.map((name) => element("option", { selected: name === chosen }, name)));
  }
}

new Page().start();
