// Whether the server is there and its models are ready; while they are not, asks again until they are.

import { ApiError } from "./api.js";

const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 5000;

export class Connection {
  /** `onChange(state, models)` hears of "ready", "unready", "away" and "locked" (the server asks for a key). */
  constructor(api, onChange) {
    this.api = api;
    this.onChange = onChange;
    this.timer = null;
    this.pauseMs = FIRST_PAUSE_MS;
  }

  /** Ask now, and again until the models are ready. */
  async check() {
    clearTimeout(this.timer);
    let state = "away";
    let models = [];
    try {
      state = (await this.api.isReady()) ? "ready" : "unready";
      models = await this.api.models();
    } catch (error) {
      if (error instanceof ApiError) state = error.status === 401 ? "locked" : "unready";
      else state = "away";
    }
    this.onChange(state, models);
    if (state === "ready" || state === "locked") {
      this.pauseMs = FIRST_PAUSE_MS;
      return;
    }
    this.timer = setTimeout(() => this.check(), this.pauseMs);
    this.pauseMs = Math.min(this.pauseMs * 1.5, LONGEST_PAUSE_MS);
  }
}
