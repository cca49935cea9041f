// One answer as it comes: its text in parts, its rounds, and the figures that follow from them. Knows no document.

/** The lot of a part of the text: proposed and accepted, the target's own, or proposed and rejected. */
export const ACCEPTED = "accepted";
export const PLAIN = "plain";
export const REJECTED = "rejected";

export class Answer {
  constructor({ mode, seed }) {
    this.mode = mode;
    this.seed = seed;
    /** waiting, streaming, done, stopped or failed */
    this.state = "waiting";
    this.text = "";
    this.rounds = [];
    this.numTokens = 0;
    this.numFirstTokens = 0;
    this.ttftMs = null;
    this.decodeMs = 0;
    this.finishReason = null;
    this.error = null;
    this.degraded = [];
  }

  /** Return an answer that was remembered. */
  static from(record) {
    const answer = Object.assign(new Answer({}), record);
    if (!answer.isOver) answer.state = "stopped"; // the page was closed while it came
    return answer;
  }

  get isOver() {
    return ["done", "stopped", "failed"].includes(this.state);
  }

  /** Take a chunk that came `sinceMs` after the request; return its round, or null if it has none. */
  add(chunk, sinceMs) {
    const choice = chunk.choices[0];
    if (choice === undefined) return null;
    const text = choice.delta ? (choice.delta.content ?? "") : choice.text;
    const trace = choice.speculative;
    this.text += text;
    this.finishReason = choice.finish_reason ?? this.finishReason;
    if (trace === undefined && text === "") return null;
    const round = trace === undefined ? { drafted: 0, kept: 0, parts: [{ text, kind: PLAIN }] } : roundOf(trace);
    this.#count(trace?.tokens.length ?? 0, sinceMs);
    if (trace?.degraded && !this.degraded.includes(trace.degraded)) this.degraded.push(trace.degraded);
    this.rounds.push(round);
    return round;
  }

  #count(numTokens, sinceMs) {
    if (!numTokens) return;
    if (this.ttftMs === null) {
      this.ttftMs = sinceMs;
      this.numFirstTokens = numTokens;
      this.state = "streaming";
    }
    this.numTokens += numTokens;
    this.decodeMs = sinceMs - this.ttftMs;
  }

  /** Tokens after the first round, per second since then; null before there are some. */
  get tokensPerS() {
    const count = this.numTokens - this.numFirstTokens;
    return count && this.decodeMs ? (1000 * count) / this.decodeMs : null;
  }

  get numDrafted() {
    return sum(this.rounds, "drafted");
  }

  get numKept() {
    return sum(this.rounds, "kept");
  }

  /** 1 + accepted / rounds, over the rounds with a drafted token, as vLLM defines it; null if there is none. */
  get meanAcceptanceLength() {
    const count = this.rounds.filter((round) => round.drafted).length;
    return count ? 1 + this.numKept / count : null;
  }
}

function sum(rounds, name) {
  return rounds.reduce((total, round) => total + round[name], 0);
}

/** Return what the page keeps of a round: drafted and kept along its path, and the parts of its text. */
function roundOf(trace) {
  const { number = 0, mode = "", num_drafted: drafted = 0, num_accepted: kept = 0, nodes = [] } = trace.round ?? {};
  return { number, mode, drafted, kept, parts: partsOf(trace, nodes) };
}

/**
 * Return the parts of a round's text, rejected branches where the target chose otherwise.
 *
 * There is a part for each token if the tokens are whole characters. Otherwise the trace's pieces are the parts: they
 * never break a character, but one may hold several tokens, or come a round later.
 */
function partsOf(trace, nodes) {
  const tokens = trace.tokens.map(asPart);
  const pieces = trace.pieces.map(asPart);
  const rejected = rejectedByDepth(nodes);
  if (joined(tokens) !== joined(pieces)) {
    const place = pieces.findLastIndex((piece) => piece.kind === ACCEPTED) + 1;
    return pieces.toSpliced(place, 0, ...[...rejected.values()].flat());
  }
  // Token i comes after i accepted ones: only the last token of a round is not drafted.
  return tokens.flatMap((token, index) => [...(rejected.get(index) ?? []), token]);
}

function asPart({ text, drafted }) {
  return { text, kind: drafted ? ACCEPTED : PLAIN };
}

function joined(parts) {
  return parts.map((part) => part.text).join("");
}

/** Return a part for each leaf of what a tree's target rejected, by the number of accepted nodes before the branch. */
function rejectedByDepth(nodes) {
  const depths = []; // accepted nodes on the way to a node, itself included
  const texts = []; // the rejected text on the way to a node, itself included
  const inner = new Set(nodes.filter((node) => !node.accepted).map((node) => node.parent));
  const byDepth = new Map();
  nodes.forEach((node, index) => {
    const [depth, text] = node.parent < 0 ? [0, ""] : [depths[node.parent], texts[node.parent]];
    depths.push(depth + (node.accepted ? 1 : 0));
    texts.push(node.accepted ? "" : text + node.text);
    if (node.accepted || inner.has(index)) return;
    byDepth.set(depth, [...(byDepth.get(depth) ?? []), { text: texts[index], kind: REJECTED }]);
  });
  return byDepth;
}
