"""A front door for the soak: one that builds no grammars ahead, since nothing asks for any and it starts a lot."""

import sys

from emberline.cli.http_worker import main
from emberline.service.service import Service


async def _nothing(service: Service) -> None:
    pass


Service.warm_up = _nothing  # type: ignore[method-assign]

if __name__ == "__main__":
    sys.exit(main())
