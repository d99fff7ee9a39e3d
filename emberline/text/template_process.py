"""The work of a confined process that renders chat templates: it compiles one, then renders conversations with it.

`handle` takes and returns JSON: it has no bounds on integers, and text may have lone surrogates. The first frame is the
template's source, its answer the names of the variables that the template reads. What importing this module does, it
does while the process still has files.
"""

import json
import time
from contextlib import suppress
from typing import Any

from emberline.protocol.errors import BadInput
from emberline.text.template_renderer import BadTemplate, LocalRenderer, RefusedTurns

_renderer: LocalRenderer | None = None
time.localtime()  # reads the time zone, for `strftime_now`
with suppress(RefusedTurns):  # imports what Jinja needs, to render and to fail
    LocalRenderer("{{ messages[0].content | trim | tojson }}{{ 'a\\n' ~ missing.x.y }}").render([{"content": ""}], {})


def handle(data: bytes) -> bytes:
    return json.dumps(_answer(json.loads(data))).encode()


def _answer(asked: Any) -> dict[str, Any]:
    """`text` or `variables`; else `error`, with `refused` if another arrangement of the messages may do."""
    global _renderer
    try:
        if _renderer is None:
            _renderer = LocalRenderer(asked["source"])
            return {"variables": sorted(_renderer.variables)}
        return {"text": _renderer.render(asked["turns"], asked["values"])}
    except BadTemplate as error:
        return {"error": str(error)}
    except BadInput as error:
        return {"error": error.message, "refused": isinstance(error, RefusedTurns)}
    except ImportError:  # there are no files any more
        return {"error": "the model's chat template needs a module of Python that is not there", "refused": True}
