# One command each; `make help` lists them. All but help and clean first see to it that what they need is installed.
SHELL := /bin/sh
.DEFAULT_GOAL := help
export PATH := $(CURDIR)/.venv/bin:$(PATH):/usr/sbin:/sbin
python := $(CURDIR)/.venv/bin/python

# ARGS goes to the command: make test ARGS='-k grant -x', make demo ARGS=--help
ARGS ?=
# Tests of two kinds run side by side; ARGS=-n0 runs one after the other, as --pdb wants it.
workers := -n2

.PHONY: help bootstrap build demo test check test-full lock clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

bootstrap: ## install what is missing: system packages (as root), .venv
	@tools/bootstrap

build: bootstrap ## the C parts, in build/meson
	@[ -f build/meson/build.ninja ] || meson setup build/meson
	@meson compile -C build/meson

demo: build ## the main job on this machine, with a simulated GPU where there is none
	@$(python) -m bench.demo $(ARGS)

test: build ## every test that this machine can run (unit, container)
	@$(python) -m pytest $(workers) $(ARGS)

check: bootstrap ## linters, types, generated files, sanitizers
	@$(python) tools/check.py

test-full: check test ## all of it: the slow tests, fresh Debian roots (root, about half an hour)
	@tools/fuzz-environment
	@$(python) -m pytest -m slow
	@tools/clean-root bookworm
	@tools/clean-root trixie

lock: bootstrap ## requirements.lock anew from pyproject.toml; ARGS=--upgrade for newer versions
	@tools/lock $(ARGS)

clean: ## remove what was built and installed in this checkout
	rm -rf build .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
