# Every target does its own set-up; a second run starts at once. ARGS="…" goes to the command behind a target.
PYTHON ?= python3
export PYTHON

.PHONY: help serve install release docs test test-all test-touched lint test-gpu cluster-test agents clients pages peers observability soak bench claims guard lock clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST)

serve: ## set up and serve the default model on 127.0.0.1:8686
	@scripts/serve $(ARGS)

install: ## set up, and put `emberline` on the PATH (~/.local/bin, or BIN=…)
	@scripts/install

release: ## build the sdist and wheels into dist/, and check them in clean environments of the Pythons here
	@scripts/release $(ARGS)

docs: ## build the documentation site into build/site; ARGS=serve shows it while you write
	@scripts/docs $(ARGS)

test: ## style, types, tests
	@scripts/test $(ARGS)

test-all: ## the same with every slow test and more random examples, before a release
	@scripts/test --all $(ARGS)

test-touched: ## the slow tests of what the branch changes, in addition to `make test`
	@scripts/test --touched $(ARGS)

lint: ## style and types alone
	@scripts/lint

test-gpu: ## the tests that need a CUDA device
	@scripts/test-gpu $(ARGS)

cluster-test: ## four machines as network namespaces: kill -9, cut links, PostgreSQL restarted; as root, else skipped
	@scripts/cluster-test $(ARGS)

agents: ## real agents (Codex, Claude Code, opencode) end to end; installs them
	@scripts/agents $(ARGS)

clients: ## other servers' clients (env.AI in a Worker, wrangler, ollama, litellm, …) end to end; installs them
	@scripts/clients $(ARGS)

pages: ## the pages in a real browser, every test; installs Chromium
	@scripts/pages $(ARGS)

peers: ## real vLLM servers, disaggregated, behind our balancer; installs them
	@scripts/peers $(ARGS)

observability: ## the Grafana board and alert rules against a real Prometheus; installs it
	@scripts/observability $(ARGS)

soak: ## kill -9 at a thousand random moments while ten thousand jobs run; hours
	@scripts/soak $(ARGS)

bench: ## Emberline and its peers in one run: a table and JSON
	@scripts/bench $(ARGS)

claims: ## published claims beside our figures: the whole system in one run; up to 30 minutes
	@scripts/claims $(ARGS)

guard: ## has anything become slower? ratios of short benchmarks against those recorded for this kind of machine
	@scripts/setup torch && .venv/bin/python -m benchmarks.compare $(ARGS)

lock: ## pin the dependencies of pyproject.toml anew
	@scripts/setup dev && scripts/lock $(ARGS)

clean: ## remove the environment and caches
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
