"""Examples below the help of the commands that `main` declares; the others keep theirs beside them."""

from __future__ import annotations

ALL = """Begin with:

specsplit orchestrate 'def fibonacci(n):'

specsplit serve
"""
ORCHESTRATE = """Examples:

specsplit orchestrate 'def fibonacci(n):'

cat prompt.txt | specsplit orchestrate -t 0.8 -s 7 --json

specsplit orchestrate -m ./large -d ./small 'The history of the abacus'
"""
SERVICE = """Examples:

specsplit target --model ./large --listen 0.0.0.0:7001 --insecure

specsplit draft --model ./small --listen 0.0.0.0:7002 --insecure

specsplit orchestrate --draft draft-host:7002 --target target-host:7001 --insecure 'The history of the abacus'
"""
GATEWAY = """Examples:

specsplit serve

specsplit serve --target-model ./large --draft-model ./small --dtype bf16

specsplit serve --target target-host:7001 --tls-cert gateway.pem --tls-key gateway.key --tls-ca ca.pem
"""
STAGE = """Examples:

specsplit stage --model ./large --layers 0:16 --listen 0.0.0.0:7101 --next host-b:7102 --insecure

specsplit stage --model ./large --layers 16:32 --listen 0.0.0.0:7102 --insecure

specsplit target --model ./large --stages host-a:7101,host-b:7102 --insecure
"""
STAGE_CHECK = """Examples:

specsplit stage-check --model ./large --stages 127.0.0.1:7101,127.0.0.1:7102
"""
