# Two commands do everything on a fresh Debian machine: `make demo` and `make test`.
.PHONY: help setup demo test quick check bench lock clean
.DEFAULT_GOAL := help

help: ## what there is to make
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## install what development needs (.venv; Debian packages when root)
	@scripts/setup dev

demo: ## run rollouts in real sandboxes on this machine and show them
	@scripts/setup run
	@.venv/bin/rollyard demo

test: ## the whole test suite, with the real vLLM and real tokenizers
	@scripts/setup dev
	@scripts/real-parts
	.venv/bin/pytest

quick: ## the test suite without its slow parts
	@scripts/setup dev
	.venv/bin/pytest -m "not slow and not vllm"

check: ## lint, format and types
	@scripts/setup dev
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/pyright

bench: ## every benchmark, with its peers
	@scripts/setup dev
	@for name in shell ipython sandbox gateway pipeline stages restart; do .venv/bin/rollyard bench $$name || exit 1; done

lock: ## write the lock files anew
	@scripts/lock

clean: ## forget the virtual environment and caches
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis
