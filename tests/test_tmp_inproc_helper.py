from contextlib import asynccontextmanager
import asyncio, time
from specsplit.model.loader import load_model
from specsplit.draft.engine import DraftEngine
from specsplit.target.engine import TargetEngine
from tests.contract.drafter_contract import DrafterContract
from tests.contract.verifier_contract import VerifierContract
from specsplit.orchestrator.pipeline import Orchestrator
from specsplit.orchestrator.records import *
import pytest
kw = dict(dtype="fp32", device="cpu", threads=1, context=256)
T = load_model("embedded", role="target", **kw); D = load_model("embedded", role="draft", **kw)
@asynccontextmanager
async def engines():
    t, d = TargetEngine(T), DraftEngine(D)
    try: yield d, t
    finally:
        await t.aclose(); await d.aclose()
class TestTarget(VerifierContract): workers = staticmethod(engines)
class TestDraft(DrafterContract): workers = staticmethod(engines)
@pytest.mark.parametrize("temp", [0.0, 1.0])
@pytest.mark.parametrize("spec", [Speculation(nodes=6,depth=6,branching=1), Speculation(nodes=8,depth=4,branching=3)])
async def test_gen(temp, spec):
    async with engines() as (d, t):
        tok = T.tokenizer
        ids = tuple(tok.encode("def fibonacci(n):"))
        req = Request(prompt_ids=ids, max_new_tokens=100, seed=3, sampling=SamplingParams(temperature=temp))
        a = await Orchestrator(t, d, tok, spec).generate(req)
        b = await Orchestrator(t, None, tok).generate(req)
        assert (a.token_ids, a.text, a.finish_reason) == (b.token_ids, b.text, b.finish_reason)
        assert a.text == tok.decode(a.token_ids)
        print(a.timings, b.timings, a.speculative_decoding, a.num_rounds, len(a.token_ids))
        n = a.num_rounds
        print("overhead us/round", (a.timings.decode_s - a.timings.draft_device_s - a.timings.target_device_s)/n*1e6)
        assert t.num_sessions == d.num_sessions == 0
        t0=time.perf_counter()
        for i in range(500): tok.decode(a.token_ids[:6])
        print("decode us", (time.perf_counter()-t0)/500*1e6)
