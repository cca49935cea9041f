// One answer on the page: text, bars of its rounds, figures. Reads an Answer and never changes it.

import { REJECTED } from "./answer.js";
import { element } from "./dom.js";

const MOST_BARS = 160;
const MARKS = { "\n": "↵", "\t": "⇥", "\r": "␍" };

export class AnswerView {
  /** `title` says which answer it is where there are two. */
  constructor(answer, title = "") {
    this.answer = answer;
    this.text = element("div", { class: "text", "aria-live": "polite", tabindex: 0 });
    this.note = element("p", { class: "note" });
    this.bars = element("div", { class: "bars", role: "img" });
    this.figures = element("dl", { class: "figures" });
    this.root = element("article", { class: "answer", "aria-label": title || "Answer" });
    if (title) this.root.append(element("h3", {}, title));
    this.root.append(this.text, this.note, this.bars, this.figures);
    for (const round of answer.rounds) this.#appendParts(round);
    this.update();
  }

  /** Show a round that has just come. */
  append(round) {
    this.#appendParts(round);
    this.update();
  }

  /** Say why nothing comes: `sentence` is the server's. */
  wait(sentence) {
    this.note.textContent = sentence;
  }

  /** Bring everything but the text up to date, once before the next frame. */
  update() {
    if (this.isUpdating) return;
    this.isUpdating = true;
    requestAnimationFrame(() => {
      this.isUpdating = false;
      const { state } = this.answer;
      this.root.dataset.state = state;
      this.text.setAttribute("aria-busy", state === "waiting" || state === "streaming");
      if (state !== "waiting") this.note.textContent = notes(this.answer).join(" ");
      this.#drawBars();
      this.figures.replaceChildren(...figures(this.answer).map(figure));
    });
  }

  #appendParts(round) {
    this.text.append(
      ...round.parts.map(({ text, kind }) =>
        kind === REJECTED
          ? element("del", { class: kind, title: "rejected" }, visible(text))
          : element("span", { class: kind }, text),
      ),
    );
  }

  #drawBars() {
    const { rounds, numDrafted, numKept } = this.answer;
    const shown = rounds.slice(-MOST_BARS);
    const most = Math.max(4, ...shown.map((round) => round.drafted));
    this.bars.replaceChildren(...shown.map((round) => bar(round, most)));
    this.bars.hidden = !numDrafted;
    this.bars.classList.toggle("is-dense", shown.length > 60);
    const which = shown.length < rounds.length ? `The last ${shown.length} of ${rounds.length}` : `${rounds.length}`;
    const said = `${which} rounds; ${numDrafted} tokens drafted, ${numKept} kept in all.`;
    this.bars.setAttribute("aria-label", said);
  }
}

/** Return a round's column: as high as what was drafted, filled as far as it was kept. */
function bar({ number, mode, drafted, kept }, most) {
  const filled = element("span", { class: "kept" });
  const title = `Round ${number} (${mode}): drafted ${drafted}, kept ${kept}`;
  const made = element("span", { class: drafted ? "bar" : "bar is-plain", title });
  made.style.setProperty("--height", drafted / most);
  filled.style.setProperty("--height", drafted ? kept / drafted : 0);
  made.append(filled);
  return made;
}

/** Return a rejected text on one line: it is not part of the answer, so it breaks no line of it. */
function visible(text) {
  return text.replace(/[\n\t\r]/g, (mark) => MARKS[mark]).replace(/\ufffd+/g, "▯");
}

function notes({ state, text, finishReason, degraded }) {
  return [
    state === "done" && text === "" ? "The model ended its answer at once." : "",
    state === "stopped" ? "Stopped." : "",
    state === "done" && finishReason === "length" ? "Ended at max tokens." : "",
    degraded.length ? `For a while without help (${degraded.join("; ")}); the text is the same.` : "",
  ].filter(Boolean);
}

function figures(answer) {
  const { tokensPerS, ttftMs, numTokens, numDrafted, numKept, meanAcceptanceLength, seed } = answer;
  return [
    ["tokens/s", tokensPerS === null ? "–" : tokensPerS.toFixed(tokensPerS < 100 ? 1 : 0)],
    ["first token", ttftMs === null ? "–" : duration(ttftMs), "TTFT: from the request to its first token"],
    ["tokens", String(numTokens)],
    ["mean acceptance length", meanAcceptanceLength === null ? "–" : meanAcceptanceLength.toFixed(2),
      "Tokens for each round with a draft: 1 + accepted / rounds"],
    ["accepted", numDrafted ? `${numKept} of ${numDrafted}` : "–", "Drafted tokens along the rounds' paths"],
    ["seed", seed === undefined ? "–" : String(seed)],
  ];
}

function figure([name, value, title]) {
  return element("div", { title }, element("dt", {}, name), element("dd", {}, value));
}

function duration(ms) {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}
