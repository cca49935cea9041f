// The gateway's public endpoints, as the page uses them.

import { readEvents } from "./sse.js";

/** The server answered with an error, in OpenAI's form. */
export class ApiError extends Error {
  constructor(status, { message, param = null, code = null } = {}) {
    super(message ?? `The server answered with status ${status}.`);
    this.status = status;
    this.param = param;
    this.code = code;
  }
}

/** There was no answer, or it broke off. */
export class ConnectionLost extends Error {}

export class Api {
  /** `key` returns the API key, empty for none. */
  constructor(key) {
    this.key = key;
  }

  /** Return the names of the models that are ready. */
  async models() {
    const answer = await this.#fetch("v1/models", {});
    return (await answer.json()).data.map((model) => model.id);
  }

  /** Return whether every model is ready; raises ConnectionLost if nobody answers. */
  async isReady() {
    try {
      await this.#fetch("ready", {});
      return true;
    } catch (error) {
      if (error instanceof ApiError) return false;
      throw error;
    }
  }

  /** Yield `{comment}` and `{chunk}` of a streamed answer; it is whole if this ends without an error. */
  async *stream(path, body, signal) {
    const headers = { "content-type": "application/json" };
    const answer = await this.#fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
    try {
      for await (const event of readEvents(answer.body)) {
        if (event.comment !== undefined) {
          yield { comment: event.comment };
          continue;
        }
        if (event.data === "[DONE]") return;
        const chunk = JSON.parse(event.data);
        if (chunk.error) throw new ApiError(200, chunk.error);
        yield { chunk };
      }
    } catch (error) {
      throw asLost(error);
    }
    throw new ConnectionLost("The connection was lost before the answer's end.");
  }

  async #fetch(path, options) {
    const key = this.key();
    const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
    let answer;
    try {
      // Relative to the page, which may lie below a proxy's path.
      answer = await fetch(new URL(path, document.baseURI), { ...options, headers, cache: "no-store" });
    } catch (error) {
      throw asLost(error);
    }
    if (answer.ok) return answer;
    const said = await answer.json().catch(() => ({}));
    throw new ApiError(answer.status, said.error);
  }
}

/** Return a network's failure, of which browsers say nothing but TypeError, in words of ours. */
function asLost(error) {
  if (!(error instanceof TypeError)) return error;
  return new ConnectionLost("The server cannot be reached, or the connection was lost.");
}
