"""Checks vectors.json with nothing but Python's standard library.

It is also an example: copy key() to take the same locks from Python.
"""

import hashlib
import json
import pathlib
import sys


def key(namespace: str, id: str) -> int:
    digest = hashlib.sha256(f"{namespace}:{id}".encode("utf-8")).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


path = pathlib.Path(__file__).with_name("vectors.json")
vectors = json.loads(path.read_text(encoding="utf-8"))["vectors"]
wrong = 0
for v in vectors:
    got = key(v["namespace"], v["id"])
    if str(got) != v["key"]:
        wrong += 1
        # ascii: the terminal's encoding may not hold the id
        print(f"{v['namespace']}:{ascii(v['id'])}: got {got}, want {v['key']}", file=sys.stderr)
print(f"{len(vectors)} vectors, {wrong} wrong")
sys.exit(1 if wrong or not vectors else 0)
