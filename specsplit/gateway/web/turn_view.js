// One turn on the page: the prompt, one or two answers, what went wrong, and what can be done about it.

import { AnswerView } from "./answer_view.js";
import { button, element } from "./dom.js";

export class TurnView {
  /** `onRetry(turn, endpoint)` asks again, at another endpoint if it is given. */
  constructor(turn, { onRetry }) {
    this.turn = turn;
    this.onRetry = onRetry;
    const titles = turn.answers.length > 1 ? ["With speculation", "Plain decoding"] : [""];
    this.answers = turn.answers.map((answer, index) => new AnswerView(answer, titles[index]));
    this.verdict = element("p", { class: "verdict", role: "status" });
    this.problem = element("div", { class: "problem", role: "alert", hidden: true });
    this.actions = element("div", { class: "actions" });
    const columns = element("div", { class: "answers" }, ...this.answers.map((answer) => answer.root));
    const prompt = element("div", { class: "prompt" }, turn.prompt);
    this.root = element("section", { class: "turn", "aria-label": "Turn" });
    this.root.append(prompt, columns, this.verdict, this.problem, this.actions);
    if (turn.answers.every((answer) => answer.isOver)) this.finish();
  }

  /** Show how it ended. */
  finish() {
    for (const answer of this.answers) answer.update();
    this.verdict.textContent = sentence(this.turn.comparison);
    this.#showProblem();
    const copy = button("Copy", () => this.#copy(copy));
    copy.disabled = this.turn.answers[0].text === "";
    this.actions.replaceChildren(copy);
    if (this.turn.error === null) this.actions.append(button("Retry", () => this.onRetry(this.turn), "quiet retry"));
  }

  #showProblem() {
    const { error } = this.turn;
    this.problem.hidden = error === null;
    if (error === null) return;
    const buttons = element("div", { class: "buttons" }, button("Try again", () => this.onRetry(this.turn), "retry"));
    if (error.status === 400 && error.param === "messages") {
      // The model has no chat template, or none for these messages.
      const complete = () => this.onRetry(this.turn, "completion");
      buttons.prepend(button("Send it as a plain prompt", complete, "retry primary"));
    }
    this.problem.replaceChildren(element("p", {}, error.message), buttons);
  }

  async #copy(copy) {
    const isCopied = await copied(this.turn.answers[0].text);
    copy.textContent = isCopied ? "Copied" : "Copying is not allowed here";
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  }
}

/** Return what a comparison says; figures of one run each, so it claims no more than them. */
function sentence(comparison) {
  if (comparison === null) return "";
  const { isEqual, difference, ratio } = comparison;
  const texts = isEqual ? "The texts are equal." : `The texts differ from character ${difference + 1} on.`;
  if (ratio === null) return `${texts} They are too short to compare speeds.`;
  const speed = ratio >= 1 ? `${ratio.toFixed(2)} times as fast` : `slower, ${ratio.toFixed(2)} times the speed`;
  return `${texts} With speculation: ${speed} after the first token, in one run each.`;
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copiedFromField(text); // without https, browsers have no clipboard but this one
  }
}

function copiedFromField(text) {
  const field = element("textarea", { class: "visually-hidden", readonly: true });
  field.value = text;
  document.body.append(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  return isCopied;
}
