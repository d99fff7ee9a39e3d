"""`python -m emberline.engine.worker`: the engine process."""

from emberline.engine.worker.main import main

if __name__ == "__main__":
    raise SystemExit(main())
