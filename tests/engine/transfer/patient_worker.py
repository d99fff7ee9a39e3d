"""A worker that gives nothing up while its machine is busy: eight prompts may take minutes there."""

from emberline.engine.transfer import incoming, outgoing
from emberline.engine.worker import main as worker
from emberline.kv.transfer import sender

incoming.WAIT_S = outgoing.TIMEOUT_S = sender.GREETING_TIMEOUT_S = 600.0

if __name__ == "__main__":
    raise SystemExit(worker.main())
