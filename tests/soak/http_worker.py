"""An HTTP worker for the soak tests: it starts often and needs no grammars, so it skips the warm-up."""

import sys

from emberline.server.http_worker import main
from emberline.service.service import Service


async def _skip(service: Service) -> None:
    pass


Service.warm_up = _skip  # type: ignore[method-assign]

if __name__ == "__main__":
    sys.exit(main())
