"""Every constant of the speculation policy, with its unit and its origin: measured (where) or chosen (why).

docs/auto.md tells the policy that they belong to, docs/log.md has the measurements.
"""

from __future__ import annotations

# Decisions of `auto` (cost_model, round_plan).

TREE_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Nodes. These are the tree sizes that a decision compares. Chosen: steps of a quarter to a half, as E[A] flattens."""
DECIDE_EVERY = 8
"""Rounds from one decision to the next. Chosen: rates hardly change within fewer; a decision took 0.25 ms."""
DECIDE_EARLY = 4
"""The same with a draft of which little is known.

Measured in 600 worlds of virtual time: with 8, texts take 3 % longer in the mean. Without a draft a stream that looks
up was left for plain decoding before its rounds had shown what it gains.
"""
EARLY_ROUNDS = 32
"""Rounds of all sessions until more is known. Measured in the same worlds: with twice as many nothing is better."""
MAX_REST = 4
"""Times as long as alone that a session which decodes plainly leaves speculation alone where many share the steps.

Chosen: it notices a changed text within 32 tokens, and of many sessions one has its turn in nearly every step.
"""
SWITCH_MARGIN = 0.05
"""Share by which another plan must be faster to replace the present one. Chosen: above the noise of the medians."""
DEAR_BRANCH = 0.05
"""Share of a plain forward that a further branch of a tree takes, from which on ping-pong drafts chains by default.

Measured on a CPU at a share of 0.1 to 0.2: chains are 10 to 15 % faster at temperature 0, 7 % at 1.
"""
SWITCH_PATIENCE = 3
"""Decisions in a row that the margin must be exceeded. Chosen: one stretch of text does not flip the mode."""
SURE_FACTOR = 1.5
"""Times as fast as the present plan that one without nodes replaces it at once; the root of it, at a second decision.

Chosen: beyond the noise of a moment.

Measured: eight sessions that begin with what one alone had decided ran at half of plain decoding for 180 rounds.
"""
DEFAULT_MAX_NODES = 32
"""Tree nodes that mode auto verifies per round at most, if the user sets no bound."""
AUTO_DEPTH = 12
"""Levels of the deepest tree in `auto`. Chosen: perfect drafts and repetitive texts gain from it in virtual time."""
LOOKUP_NODES = 16
"""Nodes that lookup is asked for at least. Chosen: they cost no draft, and only those worth their rows are verified."""
EXPLORED_ROUNDS = 3
"""Proposals before the first decision; twice as many rounds if none comes. Measured in virtual time: 3 are enough.

Measured: with 4 the draft's times are corrected, and plain decoding's not yet, so that it looks better than it is.
"""
HOPE = 0.45
"""Share by which modes with a draft may be better than is known, over the root of the number of trees that say it.

Chosen: the tokens of a round spread by about as much of their mean. Measured in virtual time: with 0, one of 24 targets
whose speed changes keeps a draft that pays unused for good; from 0.3 to 0.6 the gain is the same.
"""
HOPE_PRIOR = 8.0
"""Trees that count as seen at first. Chosen: without them a useless draft costs answers of 40 tokens a tenth."""
HOPE_TREES = 64
"""Trees that are remembered for it at most; then nothing is hoped for. Chosen: the spread is within SWITCH_MARGIN."""
HOPE_MEMORY = 0.98
"""Share of them that a decision for plain decoding leaves. Chosen: half of them are forgotten in some 270 rounds."""
PROBE_EVERY = 16
"""Rounds without the draft from one probe to the next, at least. Chosen: a draft that improves is noticed in a text."""
PROBE_SHARE = 0.01
"""Share of the time that probes may cost. Chosen: a plain round of `auto` may cost a hundredth more than `plain`.

Measured: without the time in which the draft takes in the text, a share of 0.03 cost a tenth.
"""
MAX_SAVED_PROBES = 4
"""Probes whose time is saved up at most. Chosen: a session that begins learns enough, and a long wait is no debt."""
MAX_STEPS_AWAY = 6
"""Forwards of the target during a round trip that a stream's tree allows for. Chosen: below DEFAULT_UNACKNOWLEDGED."""
STEPS_AWAY_SLACK = 0.1
"""Forwards of a round trip that count for none. Chosen: in one process the orchestrator's own time is no step away."""

LOOKUP_YIELD = 0.1
"""Tokens that a lookup has to bring in the mean to be made in each plain round.

Measured: with 16 sessions at a target the work for an offered tree takes a fifth of a token's time, alone a twentieth.
"""
LOOKUP_RETRY = 16
"""Rounds from one lookup to the next where it brings less. Chosen: hardly costs, and a changed text is noticed."""
REST_YIELD_STEP = 0.05
"""Weight of one plain round in what lookup brings to them. Chosen: one good lookup keeps it awake for 20 rounds."""
LOOKUP_YIELD_STEP = 0.1
"""Weight of one lookup in that mean. Chosen: a memory of 10 lookups; after 14 in vain there are few."""

# Forward times (step_times).

ROW_GRID = (1, 2, 3, 5, 9, 17, 33)
"""Rows of the points of a curve that nobody measured at the start. Chosen: as workers measure, one point an octave."""
ROW_COST = 0.04
"""Forwards of one row that a further row adds before anything is known. Measured: 10 to 20 rows double it on a CPU."""
PLAIN_FORGIVENESS = 0.999
"""Factor on what slowed a plain forward for each forward of another size. Chosen: it halves in 700 rounds."""
SLOW_START = 0.7
"""Share of the measured time below which a forward shows that the start was measured beside other work.

Chosen: what the start measures is the best of several, warm and behind no text, so a quiet one is rarely undercut.
"""
MAX_STEP_SESSIONS = 1024
"""Sessions in a step that a worker is believed. Chosen: beyond any batch, and a plan costs no more than with it."""
MAX_BEYOND = 4
"""Times the last point of a curve up to which forwards correct it. Chosen: two octaves; a prompt's rows are beyond."""
RATIO_WINDOW = 5
"""Observations whose median corrects a point of the curve. Chosen: outlasts two stalls in a row."""
MIN_OBSERVED = 3
"""Observations before a point is corrected. Chosen: the smallest median that ignores one outlier."""
CORRECTION_STEP = 0.25
"""Share of an error that one observation corrects, once a point is known. Chosen: it follows within a dozen rounds."""
CORRECTION_HALVING = 3.0
"""Doublings of the number of rows that halve what of a correction is believed. Chosen: most causes are common."""
STALE = 64
"""Forwards of other sizes, or plain rounds, after which a size or a tree was not seen for long.

Measured in virtual time: with half as many, trees that never pay cost 0.03 of the first 200 tokens, and 0.01 so; with
twice as many, `auto` has 0.80 of its rate four texts after a disturbance, and 0.88 so.
"""
MOST_APART = 0.22
"""Logarithm of the factor by which such a size is believed slower than one that is seen, over the weight of the latter.

So it is at most a third slower an octave from it, and twice as slow at five. Measured with the curve and decisions
alone: after a disturbance they have 0.94 of their rate again; with 0.35 it is 0.89.
"""
STALE_FORGIVENESS = 0.01
"""Share of what it is believed slower that each forward of another size takes back. Chosen: half of it in 70."""
FORK_BASE = 132
"""Tokens behind which a target measures what a branch takes. Chosen: it grows with the text; few are much shorter."""
IN_DOUBT = 0.2
"""Logarithm of a factor within which one forward shows nothing. Chosen: the noise of forwards on a shared machine."""
DISTURBED = 1.5
"""Times the least that trees have ever cost beside their rows, above which it is no property of theirs. Chosen."""
MAX_PENDING = 32
"""Observations that a curve puts off at most before it takes them in. Chosen: bounds the work of the next reader."""
MEDIAN_WINDOW = 9
"""Values of a running median (round trip, overhead, draft call). Chosen: outlasts four stalls in a row."""
FIRST_HIT_RATE = 0.6
"""Share of ahead-drafted rounds that are expected to hit before any was seen.

Chosen: good drafts have 0.7 to 0.9. Measured in virtual time, behind a round trip of 40 ms: with 0.5 a good draft that
is unlucky in its first three answers is unused for long, at four fifths of the rate; with 0.65 bad drafts cost more.
"""
HIT_RATE_MEMORY = 0.97
"""Weight of the past in the hit rate, per round. Chosen: a memory of 33 rounds."""
PACE_MEMORY = 0.9
"""Weight of the past in a streaming target's means, per step. Chosen: a memory of 10 steps."""

# Acceptance (acceptance, statistics).

HALF_LIFE = 128.0
"""Observations of a cell after which an older one counts half.

Chosen: the estimate of a rate p then spreads by sqrt(p (1 - p) ln 2 / (2 HALF_LIFE)), at most 0.026: less than the step
of 1/16 in which estimates travel; a change of text is followed within some dozens of rounds.
"""
PRIOR_WEIGHT = 4.0
"""Observations that a prior is worth. Chosen: a cell's own counts lead from the fifth on."""
FIRST_CHILD_PRIOR = 0.5
"""Acceptance of a first child at depth 1 before any was seen. Chosen: the middle; a deeper one takes that above it."""
AGREED_SHARE = 0.5
"""Share of the draft's doubt that lookup's agreement removes, a priori. Chosen; corrected after a few observations."""
MAX_DRAFT_PRIOR = 0.98
"""Largest prior acceptance of a draft's node. Chosen: no estimate begins at certainty."""
LOOKUP_PRIOR_BY_MATCH = (0.15, 0.3, 0.45, 0.6, 0.75, 0.85, 0.92)
"""Prior acceptance of lookup's nodes by bucket of match length. Chosen: a longer match is worth more."""
LOOKUP_PRIOR_BY_RANK = (1.0, 0.3, 0.15, 0.1)
"""Factor on it by rank among the siblings. Chosen: the longest match is right most often."""
PROFILE_DEPTH = 16
"""Levels of the acceptance profile that trees are planned with. Chosen: deeper than AUTO_DEPTH."""
PROFILE_BRANCHING = 4
"""Children of a node in that profile. Chosen: a further sibling catches next to nothing."""
PROFILE_STEP = 1 / 32
"""Rounding of the profile's rates. Chosen: the same profile comes again and again, so that predictions are cached."""

# Correction of predicted rates, lookup's share (statistics).

RATE_STEP = 0.04
"""Weight of one round against those before it. Chosen: a change of text shows within some dozens."""
FORGIVENESS = 0.01
"""Share of a mode's correction that each decision for another mode takes back. Chosen: it is retried after hundreds."""
USUAL_STEP = 0.005
"""Weight of one round in a mode's usual correction. Chosen: eight times the memory of the present one."""
RECOVERY = 0.1
"""Share of what a mode lacks of its usual correction that each decision for another mode takes back.

Chosen: what a disturbance drove out is tried again within a hundred rounds.
"""
TRIAL_DECISIONS = 32
"""Decisions within which a mode that is left again was tried in vain. Chosen: some hundred rounds have not paid."""
MAX_HALVINGS = 4
"""Trials in vain, one after the other, that halve what is forgiven, or double the wait for it.

Measured: with eight sessions, T=1, trials that never become rarer cost a tenth; at a sixteenth they are noise.
"""
MIN_RATE_FACTOR, MAX_RATE_FACTOR = 0.3, 16.0
"""Bounds of measured over predicted tokens per second. Measured: an upper bound of 1.5 cost 10 % of a warm text."""
LEAST_PLAIN_FACTOR = 0.7
"""Least of them for plain decoding once it is left. Chosen: its prediction is made of its own rounds' medians.

Measured: prompts of eight sessions made it 0.3, and a draft at half its rate was kept for 900 rounds.
"""
FIRST_TOKENS = 4
"""Tokens at a text's beginning that a draft always has. Chosen: models give them much attention, whatever they are."""
WINDOW_ROOM = 8
"""Levels of a tree that a draft's context has room for behind its text, or the window moves. Chosen: most trees fit."""
MAX_CAUGHT_UP_TOKENS = 64
"""With more tokens than this to take in, the draft is catching up. Chosen: more than a round commits."""
LONG_TEXT = 512
"""Tokens that a draft lacks from which their reading is weighed by itself; the time for fewer counts for the mode.

Chosen: as many of a prompt go in a step. Measured: 16 clients at T=1 lost a tenth where no reading counted for a mode.
"""
HOPED_SHARE = 0.5
"""Share of plain decoding's time that a draft is hoped to save before that is known. Chosen: as good drafts do."""
RECENT_PLAIN = 8
"""Plain rounds behind long texts, of those that are counted, whose quickest weighs a reading.

Chosen: a session counts every eighth, and what disturbs fewer may be over by then.
"""
CONTENDED_ROWS = 5
"""Rows of the forwards by which that is judged. Chosen: a small tree."""
CONTENDED = 1.4
"""Times as long as alone that a forward takes beside the draft where target and draft are said to share cores.

Measured: 1.1 to 1.3 with a core for each, 1.5 to 2.0 with three threads on two cores.
"""
MAX_STALL = 10.0
"""Times its predicted seconds that a round counts at most. Measured: one stall of 5 s was believed for thousands."""
