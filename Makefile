# Two commands do everything on a fresh Debian machine: `make demo` and `make test`.
.PHONY: help setup demo train-demo test quick coverage soak check docs screenshots bench lock clean
.DEFAULT_GOAL := help

# Tests start hundreds of Python processes: each would compile every module again if none kept the result.
unexport PYTHONDONTWRITEBYTECODE

# Test processes. Tests wait for other processes as often as for a CPU. TESTS: arguments for pytest.
WORKERS ?= $(shell cpus=$$(nproc); echo $$((cpus < 14 ? cpus + 2 : 16)))
ARGUMENTS = -n $(WORKERS) --dist loadgroup --no-loadscope-reorder $(TESTS)
PYTEST = .venv/bin/pytest $(ARGUMENTS)

help: ## what there is to make
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## install what development needs (.venv; Debian packages when root)
	@scripts/setup dev

demo: ## a small trained model solves tasks in real sandboxes on this machine, and you watch (DEMO=--base: untrained)
	@scripts/setup demo
	@.venv/bin/rollyard demo $(DEMO)

train-demo: ## RL raises the pass@1 of a small model on held-out tasks, on the CPU, while you watch
	@scripts/setup demo
	@scripts/train-demo

test: ## the whole test suite, with the real vLLM and real tokenizers
	@scripts/setup dev
	@scripts/real-parts
	$(PYTEST)

quick: ## the tests that take less than ten seconds each and need no vLLM, torch or trainer
	@scripts/setup dev
	$(PYTEST) -m "not slow and not vllm and not trainers and not local"

coverage: ## the whole suite again, with the lines and branches that it reaches, subprocesses included
	@scripts/setup dev
	@scripts/real-parts
	@rm -f .coverage .coverage.*
	-.venv/bin/coverage run -m pytest $(ARGUMENTS)
	@.venv/bin/coverage combine --quiet
	@.venv/bin/coverage report

soak: ## chaos, kills and endurance at full size, one table at the end (SOAK=NAME: only that one)
	@scripts/setup dev
	@.venv/bin/python -m tests.soak $(SOAK)

check: ## lint, format, words and types
	@scripts/setup dev
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	scripts/check-words
	.venv/bin/pyright

docs: ## the documentation as a website in build/docs; a dead link or anchor is an error
	@scripts/docs

screenshots: ## the pictures of the dashboard in docs/images, from a scripted run in Chromium
	@scripts/setup dev
	@scripts/screenshots

bench: ## every benchmark, with peers where there are any (BENCH=--quick: rough figures, sooner)
	@scripts/setup dev
	@scripts/setup demo
	@.venv/bin/rollyard bench all $(BENCH)

lock: ## write the lock files anew
	@scripts/lock

clean: ## forget the virtual environment and caches
	rm -rf .venv .venv-docs build .pytest_cache .ruff_cache .hypothesis
