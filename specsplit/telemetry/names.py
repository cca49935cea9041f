"""Every span and attribute name once, with its meaning and unit."""

from __future__ import annotations

SPANS = {
    "http": "one HTTP request at the gateway; its parent is the client's, by the header traceparent",
    "request": "one generation, from its prompt to the end of its sessions; child of http",
    "round": "one propose and one verify of one session; parent of both, child of the request",
    "propose": "from asking the draft to its answer",
    "verify": "from asking the target to its verdict",
    "rpc": "one call inside a worker that serves; its parent is the caller's span",
    "commit": "from asking a streaming target for its next commit to the commit",
    "stage": "one packet in one stage; its parent is the rpc that the target serves with it",
    "forward": "one step of one engine; its parent is the propose, verify or rpc that asked for it",
}

ATTRIBUTES = {
    "error.type": "class of the error that ended the span",
    "session": "id of the session, as the log has it",
    "round": "number of the round within the session",
    "worker": "draft or target",
    "method": "name of the remote call",
    "nodes": "tree nodes proposed or scored",
    "max_nodes": "tree nodes the budget allows",
    "max_depth": "tree levels the budget allows",
    "accepted": "drafted tokens accepted",
    "forwards": "forwards that served the call",
    "num_tokens": "tokens fed to the model for this session",
    "base_length": "tokens in the session's slot before the forward",
    "batch_size": "sessions in the step",
    "stage": "number of the stage in its chain",
    "request": "id of the HTTP request, as its answer and the log have it",
    "gen_ai.request.model": "name of the target's model",
    "gen_ai.usage.input_tokens": "tokens of the prompt",
    "gen_ai.usage.output_tokens": "tokens of the answer",
}
