// One turn of the conversation: a prompt, its answer, and perhaps plain decoding's answer to compare it with.

import { Answer } from "./answer.js";
import { ApiError, ConnectionLost } from "./api.js";

export class Turn {
  /** `request` has the endpoint and its body; `prompt` is what the user wrote. */
  constructor({ prompt, request, isComparing }) {
    this.prompt = prompt;
    this.request = request;
    const { seed, speculative } = request.body;
    this.answers = [new Answer({ mode: speculative.mode, seed })];
    if (isComparing) this.answers.push(new Answer({ mode: "plain", seed }));
    this.error = null;
  }

  /** Return a turn that was remembered. */
  static from(record) {
    return Object.assign(Object.create(Turn.prototype), record, { answers: record.answers.map(Answer.from) });
  }

  /** Whether its prompt and answer belong to the conversation that the next request sends. */
  get isPartOfConversation() {
    return this.request.endpoint === "chat" && this.error === null && this.answers[0].text !== "";
  }

  /**
   * Ask for the answers, one after the other so that they do not compete; `onRound(index, round)` hears of each round,
   * `onWait(index, sentence)` why none comes. Never raises: `error` says what went wrong.
   */
  async run(api, signal, { onRound, onWait }) {
    for (const [index, answer] of this.answers.entries()) {
      try {
        for await (const { chunk, comment, sinceMs } of chunksOf(api, this.request, answer.mode, signal)) {
          if (comment !== undefined) onWait(index, comment);
          else onRound(index, answer.add(chunk, sinceMs));
        }
        answer.state = "done";
      } catch (error) {
        answer.state = signal.aborted ? "stopped" : "failed";
        for (const later of this.answers.slice(index + 1)) later.state = "stopped";
        if (!signal.aborted) this.error = describe(error);
        return;
      }
    }
  }

  /** Return what the comparison says, or null if there is none or it has not ended. */
  get comparison() {
    const [first, plain] = this.answers;
    if (plain === undefined || !this.answers.every((answer) => answer.state === "done")) return null;
    const ratio = first.tokensPerS && plain.tokensPerS ? first.tokensPerS / plain.tokensPerS : null;
    return { isEqual: first.text === plain.text, difference: firstDifference(first.text, plain.text), ratio };
  }
}

/** Yield what comes of `request` in `mode`, each with the milliseconds since it was sent. */
async function* chunksOf(api, { path, body }, mode, signal) {
  const speculative = { trace: true, ...(mode ? { mode } : {}) };
  const beganMs = performance.now();
  for await (const item of api.stream(path, { ...body, speculative }, signal)) {
    yield { ...item, sinceMs: performance.now() - beganMs };
  }
}

function firstDifference(one, other) {
  let index = 0;
  while (index < one.length && one[index] === other[index]) index += 1;
  return index;
}

/** Return an error as it is shown and remembered. */
function describe(error) {
  if (error instanceof ConnectionLost) return { message: error.message, isLost: true };
  if (error instanceof ApiError) {
    const { message, status, param, code } = error;
    return { message, status, param, code, isLost: false };
  }
  console.error(error); // a defect of this page
  return { message: `The page failed (${error.message}).`, isLost: false };
}
