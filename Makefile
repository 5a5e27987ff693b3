# `make help` lists the targets. All but help and clean first install what they need: build and demo a few packages,
# the others everything that the tests need.
SHELL := /bin/sh
.DEFAULT_GOAL := help
export PATH := $(CURDIR)/.venv/bin:$(PATH):/usr/sbin:/sbin
python := $(CURDIR)/.venv/bin/python

# ARGS is passed to the command: make test ARGS='-k grant -x', make demo ARGS=--help
ARGS ?=
# The parts of test-full to run; if empty, all of these but the last: check test slow alone cluster bookworm trixie noble arm64.
PARTS ?=
# Three workers run tests of different kinds in parallel; ARGS=-n0 runs them one by one, as --pdb requires.
workers := -n3

# Where `make install` installs everything: $(DESTDIR)$(PREFIX).
PREFIX ?= /usr
DESTDIR ?=

.PHONY: help bootstrap build demo test check test-full install deb rpm wheel docs lock clean

help: ## print this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

bootstrap: ## install what is missing: system packages (as root), .venv
	@tools/bootstrap

build: ## compile the C parts, in build/meson
	@tools/bootstrap --run
	@[ -f build/meson/build.ninja ] || meson setup build/meson
	@meson compile -C build/meson

demo: build ## run the main job on this machine, with a simulated GPU if it has none
	@$(python) -m bench.demo $(ARGS)

test: bootstrap build ## run every test that this machine can run (unit, container)
	@$(python) -m pytest $(workers) $(ARGS)

check: bootstrap ## run linters, sanitizers, and checks of types and generated files
	@$(python) tools/check.py

test-full: ## run all tests and checks, and print a table (root, hours); PARTS="slow noble" for some parts
	@tools/test-full $(PARTS)

docs: bootstrap ## build the documents as a site, in build/docs
	@tools/docs-environment
	@build/docs-env/bin/python tools/docs_site.py

install: bootstrap ## install what packages contain, below $(DESTDIR)$(PREFIX)
	@meson setup build/install --prefix=$(PREFIX) -Dtests=false \
		$$([ ! -e build/install/build.ninja ] || echo --reconfigure) >/dev/null
	@meson compile -C build/install
	@$(python) tools/vendor.py build/vendor
	@$(python) tools/install.py --destdir "$(DESTDIR)/" --prefix $(PREFIX) --build build/install --vendor build/vendor
	@[ -n "$(DESTDIR)" ] || /usr/bin/python3 -m compileall -q $(PREFIX)/lib/tidegate/python $(PREFIX)/lib/tidegate/vendor

deb: ## build a Debian package for this release, in build/packages
	@tools/package deb

rpm: ## build an RPM package, in build/packages; ARGS="'rhel 9'" for RHEL 9
	@tools/package rpm $(ARGS)

wheel: bootstrap ## build a wheel for this architecture, in build/packages
	@tools/package wheel

lock: bootstrap ## regenerate requirements*.lock from pyproject.toml; ARGS=--upgrade for newer versions
	@tools/lock $(ARGS)

clean: ## remove what was built and installed in this checkout
	rm -rf build .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
