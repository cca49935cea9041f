"""Examples below the help of the commands that `main` declares; the others keep theirs beside them."""

from __future__ import annotations

ORCHESTRATE = """Examples:

specsplit orchestrate 'def fibonacci(n):'

cat prompt.txt | specsplit orchestrate -t 0.8 -s 7 --json

specsplit orchestrate -m ./large -d ./small 'The history of the abacus'
"""
SERVICE = """Examples:

specsplit draft --model ./small --listen 0.0.0.0:7002

specsplit target --model ./large --listen 0.0.0.0:7001

specsplit orchestrate --draft draft-host:7002 --target target-host:7001 'The history of the abacus'
"""
GATEWAY = """Examples:

specsplit serve

specsplit serve --target-model ./large --draft-model ./small --dtype bf16

specsplit serve --target target-host:7001 --draft draft-host:7002 --http 0.0.0.0:8000 --api-key-file keys
"""
STAGE = """Examples:

specsplit stage --model ./large --layers 0:16 --listen 0.0.0.0:7101 --next host-b:7102

specsplit stage --model ./large --layers 16:32 --listen 0.0.0.0:7102

specsplit target --model ./large --stages host-a:7101,host-b:7102 --listen 0.0.0.0:7001
"""
STAGE_CHECK = """Examples:

specsplit stage-check --model ./large --stages host-a:7101,host-b:7102
"""
