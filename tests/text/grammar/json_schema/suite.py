"""How much of the official JSON Schema test suite is supported.

`python -m tests.text.grammar.json_schema.suite FOLDER …`:

FOLDER is one draft's of the suite, such as `tests/draft2020-12` of its repository; the sdist of `jsonschema` carries
it too, under `json/`. Prints how many schemas are refused and why; fails if one is misread or over 10 % are refused.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema_rs

from emberline.protocol.errors import BadInput
from emberline.protocol.grammar import Grammar
from emberline.text.grammar.expressions.builder import Builder
from emberline.text.grammar.json_schema.compile import schema_expression
from tests.text.grammar.reference import Sampler, matches

SAMPLES = 40
MOST_REFUSED = 0.10
DRAFTS = {"draft7": "http://json-schema.org/draft-07/schema#", "draft6": "http://json-schema.org/draft-06/schema#",
          "draft4": "http://json-schema.org/draft-04/schema#"}  # fmt: skip


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def mistakes(grammar: Grammar, schema: Any, tests: list[dict[str, Any]]) -> list[str]:
    """Texts that the grammar has though the schema forbids them."""
    found = [compact(test["data"]) for test in tests if not test["valid"] and matches(grammar, compact(test["data"]))]
    if isinstance(schema, dict) and "localhost" in schema.get("$schema", ""):
        schema = {**schema, "$schema": "https://json-schema.org/draft/2020-12/schema"}  # no other than its own is known
    try:
        validator = jsonschema_rs.validator_for(schema)
    except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError) as error:
        print(f"not validated: {str(error).splitlines()[0]}")
        return found
    sampler = Sampler(grammar, 1)
    for index in range(SAMPLES):
        text = sampler.text((5, 20, 60, 150)[index % 4])
        if not validator.is_valid(json.loads(text)):
            found.append(text)
    return found


def measure(folder: Path) -> bool:
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for path in sorted(folder.glob("*.json")):
        for case in json.loads(path.read_text()):
            schema = case["schema"]
            if isinstance(schema, dict) and folder.name in DRAFTS:
                schema = {"$schema": DRAFTS[folder.name], **schema}
            counts["schemas"] += 1
            valid = [test["data"] for test in case["tests"] if test["valid"]]
            builder = Builder()
            try:
                grammar = builder.finish(schema_expression(builder, schema))
            except BadInput as error:
                if "contradict" in error.message:
                    counts["misread" if valid else "contradictory"] += 1
                else:
                    counts["refused"] += 1
                    reasons[f"{path.stem}: {error.message.split(' at #')[0]}"] += 1
                continue
            assert grammar is not None
            counts["supported"] += 1
            counts["valid instances"] += len(valid)
            counts["of them possible"] += sum(matches(grammar, compact(value)) for value in valid)
            for text in mistakes(grammar, schema, case["tests"]):
                counts["misread"] += 1
                print(f"MISREAD {path.stem}: {case['description']}: {text}")
    share = counts["refused"] / max(1, counts["schemas"])
    print(f"{folder.name}: " + ", ".join(f"{name} {n}" for name, n in counts.items()) + f"; refused {share:.1%}")
    for reason, n in reasons.most_common():
        print(f"  {n:3} {reason}")
    return counts["schemas"] > 0 and not counts["misread"] and share <= MOST_REFUSED


if __name__ == "__main__":
    results = [measure(Path(argument)) for argument in sys.argv[1:]]
    sys.exit(not all(results))
