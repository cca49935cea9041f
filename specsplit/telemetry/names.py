"""Every span and attribute name once, with its meaning and unit."""

from __future__ import annotations

SPANS = {
    "request": "one generation, from its prompt to the end of its sessions",
    "round": "one propose and one verify of one session; parent of both, child of the request",
    "propose": "from asking the draft to its answer",
    "verify": "from asking the target to its verdict",
    "rpc": "one call inside a worker that serves; its parent is the caller's span",
    "forward": "one step of one engine; its parent is the propose, verify or rpc that asked for it",
}

ATTRIBUTES = {
    "session": "key of the session",
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
}
